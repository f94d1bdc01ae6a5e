/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * What the parts of the x86 decoder share: one instruction, read from its begin
 * to its end.
 */
#ifndef TARGET_I386_PCOW_X86_DECODER_H
#define TARGET_I386_PCOW_X86_DECODER_H

#include "x86.h"

typedef struct Decoder {
    const X86State *state;
    const uint8_t *code;
    size_t length, at;
    bool truncated;

    /* prefixes */
    bool operand_size, repe, repne;
    bool address_size;
    int segment;                        /* -1: none */
    bool w, r, x, b;                    /* REX, or the same bits of VEX */
    enum { LEGACY, VEX, EVEX } encoding;
    unsigned pp;                        /* VEX, EVEX: 0, 66, F3, F2 */
    unsigned vector;                    /* bytes */
    bool broadcast;

    unsigned map;                       /* 1: 0F, 2: 0F38, 3: 0F3A */
    uint8_t opcode;

    uint8_t modrm;
    bool has_operand;                   /* ModRM names memory */
    uint64_t offset;                    /* of it in its segment */
    int default_segment;
    uint64_t index;                     /* scaled, part of offset */

    X86Operand *operands;
    unsigned count;
} Decoder;

static inline uint8_t next_byte(Decoder *d)
{
    if (d->at >= d->length) {
        d->truncated = true;
        return 0;
    }
    return d->code[d->at++];
}

static inline uint8_t peek_byte(const Decoder *d)
{
    return d->at < d->length ? d->code[d->at] : 0;
}

/* little endian, sign extended */
static inline int64_t next_signed(Decoder *d, unsigned bytes)
{
    uint64_t value = 0;

    for (unsigned i = 0; i < bytes; i++) {
        value |= (uint64_t)next_byte(d) << (8 * i);
    }
    if (bytes < 8 && value >> (8 * bytes - 1) & 1) {
        value |= ~UINT64_C(0) << (8 * bytes);
    }
    return (int64_t)value;
}

static inline uint64_t truncate_to(uint64_t value, unsigned bits)
{
    return bits == 64 ? value : value & ((UINT64_C(1) << bits) - 1);
}

static inline unsigned address_bits(const Decoder *d)
{
    switch (d->state->code_bits) {
    case 64:
        return d->address_size ? 32 : 64;
    case 32:
        return d->address_size ? 16 : 32;
    default:
        return d->address_size ? 32 : 16;
    }
}

/* of general purpose instructions */
static inline unsigned operand_bytes(const Decoder *d)
{
    if (d->w) {
        return 8;
    }
    return (d->state->code_bits == 16) != d->operand_size ? 2 : 4;
}

/* of push and call */
static inline unsigned stack_bytes(const Decoder *d)
{
    if (d->state->code_bits == 64) {
        return d->operand_size && !d->w ? 2 : 8;
    }
    return operand_bytes(d);
}

static inline uint64_t gpr(const Decoder *d, unsigned number)
{
    return d->state->gpr[number];
}

/* ---- target/i386/pcow/x86-opcode.c ---- */

void x86_read_opcode(Decoder *d);
/* An encoding whose operands are not computed */
bool x86_is_left_out(const Decoder *d);
bool x86_has_modrm(const Decoder *d);
/* Bytes after ModRM, SIB and displacement: RIP-relative counts from the end. */
unsigned x86_immediate_bytes(const Decoder *d);
/*
 * The unit of an EVEX 8-bit displacement (SDM vol. 2, 2.7.5), for the
 * instructions that store; for others it is a good guess.
 */
unsigned x86_evex_unit(const Decoder *d);

/* ---- target/i386/pcow/x86-address.c ---- */

void x86_read_modrm(Decoder *d);

#endif

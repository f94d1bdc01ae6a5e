/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The addressing of x86 instructions (Intel SDM vol. 2, chapters 2 and 3).
 *
 * A wrong answer is not an error: the caller asks the kernel when the answer
 * did not help.  So rare encodings are left out (APX, XOP, vector indices).
 */
#include "x86-decoder.h"

/* Intel's processors ignore the operand size of a call, AMD's do not. */
static unsigned call_bytes(const Decoder *d)
{
    return d->state->code_bits == 64 ? 8 : stack_bytes(d);
}

static uint64_t linear(const Decoder *d, int segment, uint64_t offset)
{
    if (d->state->code_bits == 64) {
        if (segment == X86_FS || segment == X86_GS) {
            offset += d->state->base[segment];
        }
        return offset;
    }
    return truncate_to(d->state->base[segment] + offset, 32);
}

static void add(Decoder *d, int segment, uint64_t offset, unsigned length,
                bool store)
{
    if (d->count < X86_MAX_OPERANDS) {
        d->operands[d->count++] = (X86Operand) {
            .address = linear(d, segment, offset),
            .length = length,
            .store = store,
        };
    }
}

static int segment_or(const Decoder *d, int segment)
{
    return d->segment >= 0 ? d->segment : segment;
}

static void add_push(Decoder *d, unsigned bytes)
{
    uint64_t sp = truncate_to(gpr(d, X86_SP) - bytes, d->state->stack_bits);

    add(d, X86_SS, sp, bytes, true);
}

static void add_modrm(Decoder *d, unsigned length, bool store)
{
    if (d->has_operand) {
        add(d, segment_or(d, d->default_segment), d->offset, length, store);
    }
}

static uint64_t string_register(const Decoder *d, unsigned number)
{
    return truncate_to(gpr(d, number), address_bits(d));
}

/* rDI, always in ES but for maskmov */
static void add_destination(Decoder *d, unsigned length)
{
    add(d, X86_ES, string_register(d, X86_DI), length, true);
}

static void add_source(Decoder *d, unsigned length)
{
    add(d, segment_or(d, X86_DS), string_register(d, X86_SI), length, false);
}

static void one_byte_operands(Decoder *d)
{
    unsigned reg = d->modrm >> 3 & 7;
    uint8_t op = d->opcode;

    switch (op) {
    case 0xa4 ... 0xa5:                 /* movs */
        add_destination(d, 8);
        add_source(d, 8);
        return;
    case 0xaa ... 0xab:                 /* stos */
    case 0x6c ... 0x6d:                 /* ins */
        add_destination(d, 8);
        return;
    case 0xa6 ... 0xa7:                 /* cmps */
        add(d, X86_ES, string_register(d, X86_DI), 8, false);
        add_source(d, 8);
        return;
    case 0xac ... 0xad:                 /* lods */
    case 0x6e ... 0x6f:                 /* outs */
        add_source(d, 8);
        return;
    case 0xae ... 0xaf:                 /* scas */
        add(d, X86_ES, string_register(d, X86_DI), 8, false);
        return;
    case 0xa0 ... 0xa3:                 /* mov with the offset in the code */
        add(d, segment_or(d, X86_DS),
            truncate_to(next_signed(d, address_bits(d) / 8), address_bits(d)),
            8, op >= 0xa2);
        return;
    case 0x06:
    case 0x0e:
    case 0x16:
    case 0x1e:                          /* push of a segment register */
    case 0x50 ... 0x57:
    case 0x68:
    case 0x6a:
    case 0x9c:                          /* push, pushf */
        add_push(d, stack_bytes(d));
        return;
    case 0xe8:
        add_push(d, call_bytes(d));
        return;
    case 0x60:                          /* pusha */
        add_push(d, 8 * stack_bytes(d));
        return;
    case 0x9a:                          /* call far */
        add_push(d, 2 * stack_bytes(d));
        return;
    case 0xc8: {                        /* enter */
        unsigned level;

        next_signed(d, 2);
        level = next_byte(d) & 31;
        add_push(d, (1 + level) * stack_bytes(d));
        return;
    }
    case 0xcc ... 0xce:                 /* int: may be on another stack */
        add_push(d, 48);
        return;
    case 0xff:
        if (reg == 2 || reg == 3 || reg == 6) {
            add_push(d, reg == 2 ? call_bytes(d) : reg == 3 ? 2 * stack_bytes(d)
                                                 : stack_bytes(d));
            add_modrm(d, 10, false);
            return;
        }
        break;
    default:
        break;
    }
    /* x87 has operands of up to 108 bytes (fsave) */
    add_modrm(d, op >= 0xd8 && op <= 0xdf ? 108 : 8, true);
}

/* bts and its kind reach beyond the operand by the bits in a register */
static void add_bit_string(Decoder *d)
{
    unsigned bytes = operand_bytes(d);
    uint64_t bits = gpr(d, (d->modrm >> 3 & 7) | (d->r ? 8 : 0));
    unsigned shift = 64 - 8 * bytes;
    int64_t bit = (int64_t)(bits << shift) >> shift;

    d->offset += (uint64_t)(bit >> (bytes == 8 ? 6 : bytes == 4 ? 5 : 4)) *
                 bytes;
    d->offset = truncate_to(d->offset, address_bits(d));
    add_modrm(d, bytes, true);
}

#define XSAVE_MAX 16384

static void two_byte_operands(Decoder *d)
{
    unsigned reg = d->modrm >> 3 & 7;
    uint8_t op = d->opcode;

    switch (op) {
    case 0x01:
        if (d->modrm == 0xfc) {         /* clzero */
            add(d, segment_or(d, X86_DS),
                string_register(d, X86_AX) & ~UINT64_C(63), 64, true);
            return;
        }
        break;
    case 0xa0:
    case 0xa8:                          /* push fs, gs */
        add_push(d, stack_bytes(d));
        return;
    case 0xa3:
    case 0xab:
    case 0xb3:
    case 0xbb:
        if (d->has_operand && d->encoding == LEGACY) {
            add_bit_string(d);
            return;
        }
        break;
    case 0xf7:                          /* maskmovq, maskmovdqu */
        add(d, segment_or(d, X86_DS), string_register(d, X86_DI), 16, true);
        return;
    case 0xae:
        add_modrm(d, reg == 0 ? 512 : reg == 4 || reg == 6 ? XSAVE_MAX : 8,
                  true);
        return;
    case 0xc7:
        add_modrm(d, reg == 4 || reg == 5 ? XSAVE_MAX : 16, true);
        return;
    default:
        break;
    }
    add_modrm(d, 16, true);
}

static void three_byte_operands(Decoder *d)
{
    if (d->opcode == 0xf8 && (d->operand_size || d->repe || d->repne)) {
        /* movdir64b, enqcmd: the destination is in the register operand */
        uint64_t to = gpr(d, (d->modrm >> 3 & 7) | (d->r ? 8 : 0));

        add(d, X86_ES, truncate_to(to, address_bits(d)), 64, true);
        add_modrm(d, 64, false);
        return;
    }
    add_modrm(d, 16, true);
}

static void vector_operands(Decoder *d)
{
    if (d->map == 1 && d->opcode == 0xf7) {
        add(d, segment_or(d, X86_DS), string_register(d, X86_DI), 16, true);
        return;
    }
    if (d->map == 2 && d->opcode == 0x4b && d->encoding == VEX) {
        /* tilestored: up to 16 rows, the index is their distance */
        uint64_t row = d->offset - d->index;

        for (unsigned i = 0; i < 16; i++, row += d->index) {
            add(d, segment_or(d, d->default_segment), row, 64, true);
        }
        return;
    }
    add_modrm(d, d->vector, true);
}

unsigned x86_memory_operands(const X86State *state, const uint8_t *code,
                             size_t length, X86Operand *operands)
{
    Decoder d = {
        .state = state,
        .code = code,
        .length = length < X86_MAX_CODE ? length : X86_MAX_CODE,
        .segment = -1,
        .operands = operands,
    };

    x86_read_opcode(&d);
    if (x86_is_left_out(&d)) {
        return 0;
    }
    if (x86_has_modrm(&d)) {
        x86_read_modrm(&d);
    }
    if (d.encoding != LEGACY) {
        vector_operands(&d);
    } else if (d.map == 0) {
        one_byte_operands(&d);
    } else if (d.map == 1) {
        two_byte_operands(&d);
    } else {
        three_byte_operands(&d);
    }
    return d.truncated ? 0 : d.count;
}

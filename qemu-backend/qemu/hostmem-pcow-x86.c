/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The addressing of x86 instructions (Intel SDM vol. 2, chapters 2 and 3).
 *
 * A wrong answer is not an error: the caller asks the kernel when the answer
 * did not help.  So rare encodings are left out (APX, XOP, vector indices).
 */
#include "hostmem-pcow-x86.h"

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

static uint8_t next_byte(Decoder *d)
{
    if (d->at >= d->length) {
        d->truncated = true;
        return 0;
    }
    return d->code[d->at++];
}

static uint8_t peek_byte(const Decoder *d)
{
    return d->at < d->length ? d->code[d->at] : 0;
}

/* little endian, sign extended */
static int64_t next_signed(Decoder *d, unsigned bytes)
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

static uint64_t truncate_to(uint64_t value, unsigned bits)
{
    return bits == 64 ? value : value & ((UINT64_C(1) << bits) - 1);
}

static unsigned address_bits(const Decoder *d)
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
static unsigned operand_bytes(const Decoder *d)
{
    if (d->w) {
        return 8;
    }
    return (d->state->code_bits == 16) != d->operand_size ? 2 : 4;
}

/* of push and call */
static unsigned stack_bytes(const Decoder *d)
{
    if (d->state->code_bits == 64) {
        return d->operand_size && !d->w ? 2 : 8;
    }
    return operand_bytes(d);
}

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

/* ---- prefixes and opcode ------------------------------------------------ */

/* Those of 1978 to 1986, in any order and number; false: no (more) of them */
static bool legacy_prefix(Decoder *d)
{
    bool is_64 = d->state->code_bits == 64;

    switch (peek_byte(d)) {
    case 0x66:
        d->operand_size = true;
        break;
    case 0x67:
        d->address_size = true;
        break;
    case 0xf2:
        d->repne = true;
        break;
    case 0xf3:
        d->repe = true;
        break;
    case 0xf0:
        break;
    case 0x26:
        d->segment = is_64 ? d->segment : X86_ES;
        break;
    case 0x2e:
        d->segment = is_64 ? d->segment : X86_CS;
        break;
    case 0x36:
        d->segment = is_64 ? d->segment : X86_SS;
        break;
    case 0x3e:
        d->segment = is_64 ? d->segment : X86_DS;
        break;
    case 0x64:
        d->segment = X86_FS;
        break;
    case 0x65:
        d->segment = X86_GS;
        break;
    default:
        return false;
    }
    d->at++;
    return true;
}

static void prefixes(Decoder *d)
{
    do {
        /* REX counts only as the last one */
        d->w = d->r = d->x = d->b = false;
        if (d->state->code_bits == 64 && (peek_byte(d) & 0xf0) == 0x40) {
            uint8_t rex = next_byte(d);

            d->w = rex & 8;
            d->r = rex & 4;
            d->x = rex & 2;
            d->b = rex & 1;
        }
    } while (legacy_prefix(d));
}

/* Outside of 64-bit mode these bytes are prefixes only before mod = 3. */
static bool is_vector_prefix(const Decoder *d)
{
    return d->state->code_bits == 64 ||
           (d->at + 1 < d->length && d->code[d->at + 1] >= 0xc0);
}

static void vex_prefix(Decoder *d)
{
    bool three_bytes = next_byte(d) == 0xc4;
    uint8_t p = next_byte(d);

    d->encoding = VEX;
    d->map = 1;
    d->r = !(p & 0x80);
    if (three_bytes) {
        d->x = !(p & 0x40);
        d->b = !(p & 0x20);
        d->map = p & 0x1f;
        p = next_byte(d);
        d->w = p & 0x80;
    }
    d->vector = p & 4 ? 32 : 16;
    d->pp = p & 3;
    d->opcode = next_byte(d);
}

static void evex_prefix(Decoder *d)
{
    uint8_t p0, p1, p2;

    next_byte(d);
    p0 = next_byte(d);
    p1 = next_byte(d);
    p2 = next_byte(d);
    d->encoding = EVEX;
    d->r = !(p0 & 0x80);
    d->x = !(p0 & 0x40);
    d->b = !(p0 & 0x20);
    d->map = p0 & 7;
    d->w = p1 & 0x80;
    d->pp = p1 & 3;
    d->vector = 16u << (p2 >> 5 & 3);
    d->broadcast = p2 & 0x10;
    d->opcode = next_byte(d);
}

static void read_opcode(Decoder *d)
{
    uint8_t first = peek_byte(d);

    if ((first == 0xc4 || first == 0xc5) && is_vector_prefix(d)) {
        vex_prefix(d);
        return;
    }
    if (first == 0x62 && is_vector_prefix(d)) {
        evex_prefix(d);
        return;
    }
    d->opcode = next_byte(d);
    if (d->opcode != 0x0f) {
        return;
    }
    d->map = 1;
    d->opcode = next_byte(d);
    if (d->opcode == 0x38 || d->opcode == 0x3a) {
        d->map = d->opcode == 0x38 ? 2 : 3;
        d->opcode = next_byte(d);
    }
}

static bool has_modrm_one_byte(const Decoder *d)
{
    uint8_t op = d->opcode;

    if (op < 0x40) {
        return (op & 7) < 4;
    }
    return op == 0x62 || op == 0x63 || op == 0x69 || op == 0x6b ||
           (op >= 0x80 && op <= 0x8f) || op == 0xc0 || op == 0xc1 ||
           (op >= 0xc4 && op <= 0xc7) || (op >= 0xd0 && op <= 0xd3) ||
           (op >= 0xd8 && op <= 0xdf) || op == 0xf6 || op == 0xf7 ||
           op == 0xfe || op == 0xff;
}

static bool has_modrm_0f(const Decoder *d)
{
    uint8_t op = d->opcode;

    return !(op == 0x05 || op == 0x06 || op == 0x07 || op == 0x08 ||
             op == 0x09 || op == 0x0b || op == 0x0e ||
             (op >= 0x30 && op <= 0x37) || op == 0x77 ||
             (op >= 0x80 && op <= 0x8f) || (op >= 0xa0 && op <= 0xa2) ||
             (op >= 0xa8 && op <= 0xaa) || (op >= 0xc8 && op <= 0xcf));
}

static bool has_modrm(const Decoder *d)
{
    switch (d->map) {
    case 0:
        return has_modrm_one_byte(d);
    case 1:
        return has_modrm_0f(d);
    default:
        return true;
    }
}

/* Bytes after ModRM, SIB and displacement: RIP-relative counts from the end. */
static unsigned immediate_bytes(const Decoder *d)
{
    unsigned z = operand_bytes(d) == 2 ? 2 : 4;
    unsigned reg = d->modrm >> 3 & 7;
    uint8_t op = d->opcode;

    switch (d->map) {
    case 0:
        if (op == 0x80 || op == 0x82 || op == 0x83 || op == 0x6b ||
            op == 0xc0 || op == 0xc1 || op == 0xc6 ||
            (op == 0xf6 && reg < 2)) {
            return 1;
        }
        return op == 0x81 || op == 0x69 || op == 0xc7 ||
               (op == 0xf7 && reg < 2) ? z : 0;
    case 1:
        return (op >= 0x70 && op <= 0x73) || op == 0xc2 ||
               (op >= 0xc4 && op <= 0xc6) ||
               (d->encoding == LEGACY &&
                (op == 0xa4 || op == 0xac || op == 0xba || op == 0x0f));
    case 3:
        return 1;
    default:
        return 0;
    }
}

/*
 * The unit of an EVEX 8-bit displacement (SDM vol. 2, 2.7.5), for the
 * instructions that store; for others it is a good guess.
 */
static unsigned evex_unit(const Decoder *d)
{
    uint8_t op = d->opcode;

    if (d->map == 1 || d->map == 5) {
        if ((op == 0x10 || op == 0x11) && d->pp >= 2) {
            return d->map == 5 ? 2 : d->pp == 2 ? 4 : 8; /* vmovss, vmovsd */
        }
        if (op == 0x13 || op == 0x17 || op == 0xd6) {
            return 8;                                   /* vmovlps, vmovhps */
        }
        if (op == 0x7e || op == 0x6e) {
            return d->map == 5 ? 2 : d->w || d->pp == 2 ? 8 : 4;
        }
    } else if (d->map == 2) {
        if (d->pp == 2 && op >= 0x10 && op <= 0x35 && (op & 0xf) <= 5) {
            /* vpmov with truncation: of words, or of quad to double words */
            unsigned kind = op & 0xf;

            return kind == 0 || kind == 3 || kind == 5 ? d->vector / 2 :
                   kind == 1 || kind == 4 ? d->vector / 4 : d->vector / 8;
        }
        if (op == 0x8a || op == 0x8b) {
            return d->w ? 8 : 4;                        /* compress */
        }
        if (op == 0x63) {
            return d->w ? 2 : 1;
        }
    } else if (d->map == 3) {
        switch (op) {
        case 0x14:
            return 1;
        case 0x15:
            return 2;
        case 0x16:
            return d->w ? 8 : 4;
        case 0x17:
            return 4;
        case 0x19:
        case 0x39:
            return 16;                                  /* extract */
        case 0x1b:
        case 0x3b:
            return 32;
        case 0x1d:
            return d->vector / 2;                       /* vcvtps2ph */
        default:
            break;
        }
    }
    return d->broadcast ? (d->w ? 8 : 4) : d->vector;
}

static bool has_vector_index(const Decoder *d)
{
    uint8_t op = d->opcode;

    return d->map == 2 && d->encoding != LEGACY &&
           ((op >= 0x90 && op <= 0x93) ||
            (d->encoding == EVEX &&
             ((op >= 0xa0 && op <= 0xa3) || op == 0xc6 || op == 0xc7)));
}

/* APX and XOP use prefixes that mean something else where they are unknown. */
static bool is_left_out(const Decoder *d)
{
    switch (d->encoding) {
    case EVEX:
        return d->map == 0 || d->map == 4 || d->map == 7;
    case VEX:
        return d->map == 0 || d->map > 3;
    default:
        return d->map == 0 &&
               ((d->opcode == 0xd5 && d->state->code_bits == 64) ||
                (d->opcode == 0x8f && (peek_byte(d) & 0x38)));
    }
}

/* ---- ModRM --------------------------------------------------------------- */

static uint64_t gpr(const Decoder *d, unsigned number)
{
    return d->state->gpr[number];
}

static void address_16(Decoder *d, unsigned mod, unsigned rm)
{
    static const int8_t first[8] = {
        X86_BX, X86_BX, X86_BP, X86_BP, X86_SI, X86_DI, X86_BP, X86_BX
    };
    static const int8_t second[8] = {
        X86_SI, X86_DI, X86_SI, X86_DI, -1, -1, -1, -1
    };

    if (mod == 0 && rm == 6) {
        d->offset = next_signed(d, 2);
        return;
    }
    d->offset = gpr(d, first[rm]);
    if (second[rm] >= 0) {
        d->offset += gpr(d, second[rm]);
    }
    if (first[rm] == X86_BP) {
        d->default_segment = X86_SS;
    }
    if (mod == 1) {
        d->offset += next_signed(d, 1);
    } else if (mod == 2) {
        d->offset += next_signed(d, 2);
    }
}

static void address_sib(Decoder *d, unsigned mod)
{
    uint8_t sib = next_byte(d);
    unsigned index = (sib >> 3 & 7) | (d->x ? 8 : 0);
    unsigned base = (sib & 7) | (d->b ? 8 : 0);

    if (index != X86_SP) {
        d->index = gpr(d, index) << (sib >> 6);
    }
    if ((sib & 7) == X86_BP && mod == 0) {
        d->offset = next_signed(d, 4);
    } else {
        d->offset = gpr(d, base);
        if (base == X86_SP || base == X86_BP) {
            d->default_segment = X86_SS;
        }
        /* pop moves the stack pointer first */
        if (base == X86_SP && d->map == 0 && d->opcode == 0x8f) {
            d->offset += stack_bytes(d);
        }
    }
    d->offset += d->index;
}

static void address_32_64(Decoder *d, unsigned mod, unsigned rm)
{
    bool ip_relative = false;

    if (rm == X86_SP) {
        address_sib(d, mod);
    } else if (rm == X86_BP && mod == 0) {
        d->offset = next_signed(d, 4);
        ip_relative = d->state->code_bits == 64;
    } else {
        d->offset = gpr(d, rm | (d->b ? 8 : 0));
        if (rm == X86_BP && !d->b) {
            d->default_segment = X86_SS;
        }
    }
    if (mod == 1) {
        d->offset += next_signed(d, 1) *
                     (int64_t)(d->encoding == EVEX ? evex_unit(d) : 1);
    } else if (mod == 2) {
        d->offset += next_signed(d, 4);
    }
    if (ip_relative) {
        d->offset += d->state->ip + d->at + immediate_bytes(d);
    }
}

static void read_modrm(Decoder *d)
{
    unsigned mod, rm;

    d->modrm = next_byte(d);
    mod = d->modrm >> 6;
    rm = d->modrm & 7;
    d->default_segment = X86_DS;
    if (mod == 3) {
        return;
    }
    d->has_operand = true;
    if (address_bits(d) == 16) {
        address_16(d, mod, rm);
    } else {
        address_32_64(d, mod, rm);
    }
    d->offset = truncate_to(d->offset, address_bits(d));
}

/* ---- operands ------------------------------------------------------------ */

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

    prefixes(&d);
    read_opcode(&d);
    if (has_vector_index(&d) || is_left_out(&d)) {
        return 0;
    }
    if (has_modrm(&d)) {
        read_modrm(&d);
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

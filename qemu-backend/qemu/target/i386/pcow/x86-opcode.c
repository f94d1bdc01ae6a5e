/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Prefixes and opcode of an x86 instruction, and what follows from them. */
#include "x86-decoder.h"

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

void x86_read_opcode(Decoder *d)
{
    uint8_t first;

    prefixes(d);
    first = peek_byte(d);
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

bool x86_has_modrm(const Decoder *d)
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

unsigned x86_immediate_bytes(const Decoder *d)
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

unsigned x86_evex_unit(const Decoder *d)
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
bool x86_is_left_out(const Decoder *d)
{
    if (has_vector_index(d)) {
        return true;
    }
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

/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The address that ModRM and what follows it name. */
#include "x86-decoder.h"

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
                     (int64_t)(d->encoding == EVEX ? x86_evex_unit(d) : 1);
    } else if (mod == 2) {
        d->offset += next_signed(d, 4);
    }
    if (ip_relative) {
        d->offset += d->state->ip + d->at + x86_immediate_bytes(d);
    }
}

void x86_read_modrm(Decoder *d)
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

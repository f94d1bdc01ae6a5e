/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Where an x86 instruction may store: from its bytes and the registers, without
 * executing it.  Needs nothing of QEMU.
 */
#ifndef TARGET_I386_PCOW_X86_H
#define TARGET_I386_PCOW_X86_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define X86_MAX_CODE 15                 /* bytes of an instruction */
#define X86_MAX_OPERANDS 18
#define X86_GPRS 16

/* in the order of their encoding */
enum { X86_AX, X86_CX, X86_DX, X86_BX, X86_SP, X86_BP, X86_SI, X86_DI };
enum { X86_ES, X86_CS, X86_SS, X86_DS, X86_FS, X86_GS, X86_SEGMENTS };

typedef struct X86State {
    uint64_t gpr[X86_GPRS];
    uint64_t ip;
    uint64_t base[X86_SEGMENTS];
    unsigned code_bits;                 /* 16, 32 or 64 */
    unsigned stack_bits;
} X86State;

typedef struct X86Operand {
    uint64_t address;                   /* linear */
    unsigned length;                    /* bytes, an upper bound */
    bool store;                         /* it may be stored to */
} X86Operand;

/*
 * The memory operands of the instruction in @code, the likeliest to be stored
 * to first.  Returns their number; 0 if the instruction has none or is not
 * known, or if @length bytes are not all of it.
 */
unsigned x86_memory_operands(const X86State *state, const uint8_t *code,
                             size_t length, X86Operand *operands);

#endif

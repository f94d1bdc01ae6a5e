/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Stores of integer instructions: moves, read-modify-write, locked ones, the stack, code that was
 * just written.
 */
#include "stores.h"

#include <cpuid.h>

STORE(mov8, "movb %b[a], (%[to])")
STORE(mov16, "movw %w[a], (%[to])")
STORE(mov32, "movl %k[a], (%[to])")
STORE(mov64, "movq %[a], (%[to])")
STORE(mov_high_byte, "mov %[a], %%rax; movb %%ah, (%[to])", "rax")
STORE(mov8_immediate, "movb $0x5a, (%[to])")
STORE(mov16_immediate, "movw $0x1234, (%[to])")
STORE(mov32_immediate, "movl $0x12345678, (%[to])")
STORE(mov64_immediate, "movq $-0x12345678, (%[to])")
STORE(mov_indexed, "mov $3, %%ecx; movq %[a], 8(%[to],%%rcx,4)")
STORE(mov_segment, "movw %%ds, (%[to])")
STORE(mov_address32, "movq %[a], (%[to]); mov %[to], %%rax; movl %k[b], 4(%%rax)", "rax")
STORE(movnti32, "movntil %k[a], (%[to])")
STORE(movnti64, "movntiq %[a], (%[to]); sfence")
STORE(movbe64, "movbeq %[a], (%[to]); movbew %w[b], 8(%[to])")
STORE(two_stores, "movq %[a], (%[to]); movq %[b], 8(%[to]); movb %b[a], 16(%[to])")
STORE(add8, "addb %b[a], (%[to])")
STORE(add32_immediate, "addl $0x1234567, (%[to])")
STORE(add64, "addq %[a], (%[to])")
STORE(adc64, "stc; adcq %[a], (%[to])")
STORE(sub16, "subw %w[a], (%[to])")
STORE(sbb64, "stc; sbbq %[a], (%[to])")
STORE(and64, "andq %[a], (%[to])")
STORE(or64_immediate, "orq $0x80, (%[to])")
STORE(xor32, "xorl %k[a], (%[to])")
STORE(inc64, "incq (%[to])")
STORE(dec8, "decb (%[to])")
STORE(neg64, "negq (%[to])")
STORE(not32, "notl (%[to])")
STORE(shl64, "shlq $5, (%[to])")
STORE(sar32, "mov %k[a], %%ecx; sarl %%cl, (%[to])")
STORE(rol64, "rolq $9, (%[to])")
STORE(rcr64, "clc; rcrq $1, (%[to])")
STORE(shld64, "shldq $13, %[a], (%[to])")
STORE(bts_far, "mov %[a], %%rcx; and $255, %%ecx; btsq %%rcx, (%[to])")
STORE(btr_immediate, "btrl $7, (%[to])")
STORE(btc_far, "mov %[a], %%rcx; and $127, %%ecx; btcl %%ecx, (%[to])")
STORE(set_byte, "test %[a], %[a]; setns (%[to])")
STORE(xchg64, "mov %[a], %%rax; xchgq %%rax, (%[to])", "rax")
STORE(xchg8, "mov %[a], %%rax; xchgb %%al, (%[to])", "rax")
STORE(xadd64, "mov %[a], %%rax; xaddq %%rax, (%[to])", "rax")
STORE(cmpxchg_equal, "movq (%[to]), %%rax; cmpxchgq %[a], (%[to])", "rax")
STORE(cmpxchg_unequal, "movq (%[to]), %%rax; inc %%rax; cmpxchgq %[a], (%[to])", "rax")
STORE(
    cmpxchg8b,
    "movl (%[to]), %%eax; movl 4(%[to]), %%edx; mov %[a], %%rbx; mov $77, %%ecx; cmpxchg8b (%[to])",
    "rax", "rbx", "rdx")
STORE(cmpxchg16b,
      "movq (%[to]), %%rax; movq 8(%[to]), %%rdx; mov %[a], %%rbx; mov $78, %%ecx; lock cmpxchg16b "
      "(%[to])",
      "rax", "rbx", "rdx")
STORE(lock_add64, "lock addq %[a], (%[to])")
STORE(lock_xadd32, "mov %[a], %%rax; lock xaddl %%eax, (%[to])", "rax")
STORE(lock_bts, "lock btsq $17, (%[to])")
STORE(lock_or8, "lock orb $0x10, (%[to])")
STORE(lock_cmpxchg, "movq (%[to]), %%rax; lock cmpxchgq %[a], (%[to])", "rax")
STORE(lock_neg, "lock negq (%[to])")
STORE(push_register,
      "mov %%rsp, %%rax; lea 64(%[to]), %%rsp; push %[a]; push %[b]; pushw $0x1234; pushq $-5; mov "
      "%%rax, %%rsp",
      "rax")
STORE(push_memory,
      "mov %%rsp, %%rax; lea 24(%[to]), %%rsp; pushq (%[from]); pushq 8(%[from]); mov %%rax, %%rsp",
      "rax")
STORE(push_flags, "mov %%rsp, %%rax; lea 16(%[to]), %%rsp; pushfq; mov %%rax, %%rsp", "rax")
STORE(call,
      "mov %%rsp, %%rax; lea 32(%[to]), %%rsp; call 1f; jmp 2f; 1: call 3f; ret; 3: ret; 2: mov "
      "%%rax, %%rsp",
      "rax")
STORE(call_indirect,
      "mov %%rsp, %%rax; lea 1f(%%rip), %%rdx; lea 16(%[to]), %%rsp; call *%%rdx; jmp 2f; 1: ret; "
      "2: mov %%rax, %%rsp",
      "rax", "rdx")
STORE(pop_memory, "push %[a]; popq (%[to])")
STORE(enter,
      "mov %%rsp, %%rax; mov %%rbp, %%rdx; mov $0x4321, %%ebp; lea 64(%[to]), %%rsp; enter $8, $0; "
      "mov %%rax, %%rsp; mov %%rdx, %%rbp",
      "rax", "rdx")
STORE(prefetch_for_write, "prefetchw (%[to])")
STORE(clflush, "clflush (%[to])")
STORE(clflush_after_store, "movq %[a], (%[to]); clflush (%[to]); mfence")
STORE(clflushopt, "clflushopt (%[to]); movq %[a], (%[to]); clflushopt (%[to]); sfence")
STORE(clwb, "clwb (%[to]); movq %[a], (%[to]); clwb (%[to]); sfence")

/* Code is written to the page and run there, then changed and run again. */
static void execute(uint8_t *to, const uint8_t *from, const struct operands *o)
{
    int (*function)(void) = (int (*)(void))(uintptr_t)to;

    (void)from;
    for (int round = 0; round < 2; round++) {
        uint32_t value = (uint32_t)(o->a >> (32 * round));

        to[0] = 0xb8;                           /* mov $value, %eax */
        *(volatile uint32_t *)(to + 1) = value;
        to[5] = 0xc3;                           /* ret */
        *(volatile uint32_t *)(to + 8) = (uint32_t)function();
    }
}

static int has(unsigned leaf, int number, unsigned bit)
{
    unsigned regs[4];

    return __get_cpuid_count(leaf, 0, &regs[0], &regs[1], &regs[2], &regs[3])
           && regs[number] >> bit & 1;
}

static int has_movbe(void)
{
    return has(1, 2, 22);
}

static int has_clflushopt(void)
{
    return has(7, 1, 23);
}

static int has_clwb(void)
{
    return has(7, 1, 24);
}

static int has_prefetchw(void)
{
    return has(0x80000001, 2, 8);
}

#define KIND(NAME, SPAN) { #NAME, NAME, SPAN, 1, NULL }

const struct store_kind scalar_kinds[] = {
    KIND(mov8, 1),
    KIND(mov16, 2),
    KIND(mov32, 4),
    KIND(mov64, 8),
    KIND(mov_high_byte, 1),
    KIND(mov8_immediate, 1),
    KIND(mov16_immediate, 2),
    KIND(mov32_immediate, 4),
    KIND(mov64_immediate, 8),
    KIND(mov_indexed, 28),
    KIND(mov_segment, 2),
    KIND(mov_address32, 8),
    KIND(movnti32, 4),
    KIND(movnti64, 8),
    {"movbe64", movbe64, 10, 1, has_movbe},
    KIND(two_stores, 17),
    KIND(add8, 1),
    KIND(add32_immediate, 4),
    KIND(add64, 8),
    KIND(adc64, 8),
    KIND(sub16, 2),
    KIND(sbb64, 8),
    KIND(and64, 8),
    KIND(or64_immediate, 8),
    KIND(xor32, 4),
    KIND(inc64, 8),
    KIND(dec8, 1),
    KIND(neg64, 8),
    KIND(not32, 4),
    KIND(shl64, 8),
    KIND(sar32, 4),
    KIND(rol64, 8),
    KIND(rcr64, 8),
    KIND(shld64, 8),
    KIND(bts_far, 32),
    KIND(btr_immediate, 4),
    KIND(btc_far, 16),
    KIND(set_byte, 1),
    KIND(xchg64, 8),
    KIND(xchg8, 1),
    KIND(xadd64, 8),
    KIND(cmpxchg_equal, 8),
    KIND(cmpxchg_unequal, 8),
    KIND(cmpxchg8b, 8),
    {"cmpxchg16b", cmpxchg16b, 16, 16, NULL},
    KIND(lock_add64, 8),
    KIND(lock_xadd32, 4),
    KIND(lock_bts, 8),
    KIND(lock_or8, 1),
    KIND(lock_cmpxchg, 8),
    KIND(lock_neg, 8),
    KIND(push_register, 64),
    KIND(push_memory, 24),
    KIND(push_flags, 16),
    KIND(call, 32),
    KIND(call_indirect, 16),
    KIND(pop_memory, 8),
    KIND(enter, 64),
    {"prefetch_for_write", prefetch_for_write, 1, 1, has_prefetchw},
    KIND(clflush, 1),
    KIND(clflush_after_store, 8),
    {"clflushopt", clflushopt, 8, 1, has_clflushopt},
    {"clwb", clwb, 8, 1, has_clwb},
    KIND(execute, 12),
};
const size_t scalar_kinds_count = COUNT(scalar_kinds);

/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Where x86 instructions store: encodings with known answers in every mode, and in 64-bit mode what
 * the processor itself says: random instructions run with registers that point to memory without
 * access, and the address of the fault is compared.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cmocka.h>

#include "x86.h"

/* ---- known answers --------------------------------------------------------------------------- */

/* Registers of the table: distinct, small, so that sums can be read. */
static const X86State in_64 = {
    .gpr = {0x10000, 0x20000, 0x30000, 0x40000, 0x50000, 0x60000, 0x70000, 0x80000,
            0x90000, 0xa0000, 0xb0000, 0xc0000, 0xd0000, 0xe0000, 0xf0000, 0x100000},
    .ip = 0x400000,
    .base = {0x1, 0x2, 0x3, 0x4, 0x7f0000000000, 0x7e0000000000},
    .code_bits = 64, .stack_bits = 64,
};
static const X86State in_32 = {
    .gpr = {0x10000, 0x20000, 0x30000, 0x40000, 0x50000, 0x60000, 0x70000, 0x80000},
    .ip = 0x400000,
    .base = {0x1000000, 0x2000000, 0x3000000, 0x4000000, 0x5000000, 0x6000000},
    .code_bits = 32, .stack_bits = 32,
};
static const X86State in_16 = {
    .gpr = {0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80},
    .ip = 0x100,
    .base = {0x10000, 0x20000, 0x30000, 0x40000, 0x50000, 0x60000},
    .code_bits = 16, .stack_bits = 16,
};

#define NOTHING UINT64_MAX

static const struct known {
    const X86State *state;
    const char *text;                  /* for messages */
    uint8_t code[X86_MAX_CODE];
    uint64_t address;                  /* of the first operand */
} table[] = {
    {&in_64, "mov %al,(%rdi)", {0x88, 0x07}, 0x80000},
    {&in_64, "mov %rax,0x10(%rbx)", {0x48, 0x89, 0x43, 0x10}, 0x40010},
    {&in_64, "mov %rax,-8(%rbp)", {0x48, 0x89, 0x45, 0xf8}, 0x5fff8},
    {&in_64, "mov %eax,(%rsp)", {0x89, 0x04, 0x24}, 0x50000},
    {&in_64, "mov %eax,(%r12)", {0x41, 0x89, 0x04, 0x24}, 0xd0000},
    {&in_64, "mov %eax,0(%r13)", {0x41, 0x89, 0x45, 0x00}, 0xe0000},
    {&in_64, "mov %eax,(%rbx,%rcx,8)", {0x89, 0x04, 0xcb}, 0x140000},
    {&in_64, "mov %eax,0x100(,%r12,4)", {0x42, 0x89, 0x04, 0xa5, 0x00, 0x01, 0x00, 0x00}, 0x340100},
    {&in_64, "mov %eax,0x1000(%rip)", {0x89, 0x05, 0x00, 0x10, 0x00, 0x00}, 0x401006},
    {&in_64, "movl $1,0x1000(%rip)", {0xc7, 0x05, 0x00, 0x10, 0x00, 0x00, 1, 0, 0, 0}, 0x40100a},
    {&in_64, "movw $1,0x1000(%rip)", {0x66, 0xc7, 0x05, 0x00, 0x10, 0x00, 0x00, 1, 0}, 0x401009},
    {&in_64, "notl 0x1000(%rip)", {0xf7, 0x15, 0x00, 0x10, 0x00, 0x00}, 0x401006},
    {&in_64, "shld $1,%eax,0x1000(%rip)", {0x0f, 0xa4, 0x05, 0x00, 0x10, 0x00, 0x00, 1}, 0x401008},
    {&in_64,
     "pextrd $1,%xmm0,0x1000(%rip)",
     {0x66, 0x0f, 0x3a, 0x16, 0x05, 0x00, 0x10, 0x00, 0x00, 1},
     0x40100a},
    {&in_64, "mov %eax,%fs:(%rdi)", {0x64, 0x89, 0x07}, 0x7f0000080000},
    {&in_64, "mov %eax,%gs:8", {0x65, 0x89, 0x04, 0x25, 8, 0, 0, 0}, 0x7e0000000008},
    {&in_64, "mov %eax,%es:(%rdi)", {0x26, 0x89, 0x07}, 0x80000},
    {&in_64,
     "mov %al,0x1122334455667788",
     {0xa2, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11},
     0x1122334455667788},
    {&in_64, "mov %eax,(%edi)", {0x67, 0x89, 0x07}, 0x80000},
    {&in_64, "REX before a prefix does not count", {0x41, 0x66, 0x89, 0x07}, 0x80000},
    {&in_64, "lock cmpxchg16b (%rsi)", {0xf0, 0x48, 0x0f, 0xc7, 0x0e}, 0x70000},
    {&in_64, "push %rax", {0x50}, 0x4fff8},
    {&in_64, "push %ax", {0x66, 0x50}, 0x4fffe},
    {&in_64, "push $1", {0x6a, 1}, 0x4fff8},
    {&in_64, "push (%rdi)", {0xff, 0x37}, 0x4fff8},
    {&in_64, "call *(%rdi)", {0xff, 0x17}, 0x4fff8},
    {&in_64, "call rel", {0xe8, 0, 0, 0, 0}, 0x4fff8},
    {&in_64, "enter $16,$1", {0xc8, 16, 0, 1}, 0x4fff0},
    {&in_64, "pushf", {0x9c}, 0x4fff8},
    {&in_64, "push %fs", {0x0f, 0xa0}, 0x4fff8},
    {&in_64, "pop (%rsp)", {0x8f, 0x04, 0x24}, 0x50008},
    {&in_64, "pop 8(%rdi)", {0x8f, 0x47, 0x08}, 0x80008},
    {&in_64, "rep stosq", {0xf3, 0x48, 0xab}, 0x80000},
    {&in_64, "rep movsb", {0xf3, 0xa4}, 0x80000},
    {&in_64, "movsb %fs:", {0x64, 0xa4}, 0x80000},
    {&in_64, "insb", {0x6c}, 0x80000},
    {&in_64, "bts %rax,(%rdi)", {0x48, 0x0f, 0xab, 0x07}, 0x82000},
    {&in_64, "btsl $1,(%rdi)", {0x0f, 0xba, 0x2f, 1}, 0x80000},
    {&in_64, "maskmovdqu %xmm1,%xmm0", {0x66, 0x0f, 0xf7, 0xc1}, 0x80000},
    {&in_64, "vmaskmovdqu %xmm1,%xmm0", {0xc5, 0xf9, 0xf7, 0xc1}, 0x80000},
    {&in_64, "clzero", {0x0f, 0x01, 0xfc}, 0x10000},
    {&in_64, "movdir64b (%rdi),%rax", {0x66, 0x0f, 0x38, 0xf8, 0x07}, 0x10000},
    {&in_64, "movdiri %eax,(%rdi)", {0x0f, 0x38, 0xf9, 0x07}, 0x80000},
    {&in_64, "xsave (%rdi)", {0x0f, 0xae, 0x27}, 0x80000},
    {&in_64, "fstpt 4(%rdi)", {0xdb, 0x7f, 0x04}, 0x80004},
    {&in_64, "vmovups %ymm0,0x20(%rdi)", {0xc5, 0xfc, 0x11, 0x47, 0x20}, 0x80020},
    {&in_64, "vmovups %ymm0,(%r8,%r9,2)", {0xc4, 0x81, 0x7c, 0x11, 0x04, 0x48}, 0x1d0000},
    {&in_64, "vmovups %zmm0,0x40(%rdi)", {0x62, 0xf1, 0x7c, 0x48, 0x11, 0x47, 0x01}, 0x80040},
    {&in_64, "vmovss %xmm16,-4(%rdi)", {0x62, 0xe1, 0x7e, 0x08, 0x11, 0x47, 0xff}, 0x7fffc},
    {&in_64, "vpmovqb %zmm0,8(%rdi)", {0x62, 0xf2, 0x7e, 0x48, 0x32, 0x47, 0x01}, 0x80008},
    {&in_64,
     "vextracti32x4 $1,%zmm0,0x10(%rdi)",
     {0x62, 0xf3, 0x7d, 0x48, 0x39, 0x47, 0x01, 1},
     0x80010},
    {&in_64, "vpcompressd %zmm0,4(%rdi)", {0x62, 0xf2, 0x7d, 0x48, 0x8b, 0x47, 0x01}, 0x80004},
    {&in_64,
     "tilestored %tmm0,0x10(%rdi,%rcx,1)",
     {0xc4, 0xe2, 0x7a, 0x4b, 0x44, 0x0f, 0x10},
     0x80010},
    {&in_64,
     "vpscatterdd: a vector of addresses",
     {0x62, 0xf2, 0x7d, 0x49, 0xa0, 0x04, 0x0f},
     NOTHING},
    {&in_64, "REX2 mov: not known", {0xd5, 0x00, 0x89, 0x07}, NOTHING},
    {&in_64, "mov %eax,%ebx", {0x89, 0xc3}, NOTHING},
    {&in_64, "nop", {0x90}, NOTHING},
    {&in_64, "syscall", {0x0f, 0x05}, NOTHING},

    {&in_32, "mov %eax,(%edi)", {0x89, 0x07}, 0x4080000},
    {&in_32, "mov %eax,4(%ebp)", {0x89, 0x45, 0x04}, 0x3060004},
    {&in_32, "mov %eax,(%esp)", {0x89, 0x04, 0x24}, 0x3050000},
    {&in_32, "mov %eax,%gs:(%edi)", {0x65, 0x89, 0x07}, 0x6080000},
    {&in_32,
     "mov %eax,0x1000: absolute, not relative",
     {0x89, 0x05, 0x00, 0x10, 0x00, 0x00},
     0x4001000},
    {&in_32, "mov %eax,(%bx,%si)", {0x67, 0x89, 0x00}, 0x4000000},
    {&in_32, "movsl", {0xa5}, 0x1080000},
    {&in_32, "mov %al,moffs", {0xa2, 0x78, 0x56, 0x34, 0x02}, 0x6345678},
    {&in_32, "push %eax", {0x50}, 0x304fffc},
    {&in_32, "pushw %ax", {0x66, 0x50}, 0x304fffe},
    {&in_32, "pusha", {0x60}, 0x304ffe0},
    {&in_32, "push %ds", {0x1e}, 0x304fffc},
    {&in_32, "lcall", {0x9a, 0, 0, 0, 0, 0, 0}, 0x304fff8},
    {&in_32, "inc %eax (a prefix in 64-bit mode)", {0x40}, NOTHING},
    {&in_32, "les (%edi),%eax", {0xc4, 0x07}, 0x4080000},
    {&in_32, "bound (%edi),%eax", {0x62, 0x07}, 0x4080000},
    {&in_32, "vmovups %ymm0,(%edi)", {0xc5, 0xfc, 0x11, 0x07}, 0x4080000},

    {&in_16, "mov %ax,(%bx,%si)", {0x89, 0x00}, 0x400b0},
    {&in_16, "mov %ax,(%bp,%di)", {0x89, 0x03}, 0x300e0},
    {&in_16, "mov %ax,(%si)", {0x89, 0x04}, 0x40070},
    {&in_16, "mov %ax,0x1234", {0x89, 0x06, 0x34, 0x12}, 0x41234},
    {&in_16, "mov %ax,-1(%bp)", {0x89, 0x46, 0xff}, 0x3005f},
    {&in_16, "mov %ax,0x1000(%bx)", {0x89, 0x87, 0x00, 0x10}, 0x41040},
    {&in_16, "mov %ax,(%eax)", {0x67, 0x89, 0x00}, 0x40010},
    {&in_16, "stosw", {0xab}, 0x10080},
    {&in_16, "push %ax", {0x50}, 0x3004e},
    {&in_16, "pusha", {0x60}, 0x30040},
    {&in_16, "int $3", {0xcc}, 0x30020},
};

static void test_known_encodings(void **state)
{
    (void)state;
    for (unsigned i = 0; i < sizeof table / sizeof *table; i++) {
        X86Operand operands[X86_MAX_OPERANDS];
        unsigned count =
            x86_memory_operands(table[i].state, table[i].code, sizeof table[i].code, operands);
        uint64_t address = count ? operands[0].address : NOTHING;

        if (address != table[i].address)
            fail_msg("%u-bit %s: 0x%llx, not 0x%llx", table[i].state->code_bits, table[i].text,
                     (unsigned long long)address, (unsigned long long)table[i].address);
    }
}

static void test_second_operands(void **state)
{
    static const uint8_t movs[] = {0xa4}, push[] = {0xff, 0x37},
                         tile[] = {0xc4, 0xe2, 0x7a, 0x4b, 0x44, 0x0f, 0x10};
    X86Operand operands[X86_MAX_OPERANDS];

    (void)state;
    assert_int_equal(x86_memory_operands(&in_64, movs, sizeof movs, operands), 2);
    assert_true(operands[0].store && !operands[1].store);
    assert_int_equal(operands[1].address, 0x70000);
    assert_int_equal(x86_memory_operands(&in_64, push, sizeof push, operands), 2);
    assert_true(operands[0].store && !operands[1].store);
    assert_int_equal(operands[1].address, 0x80000);
    assert_int_equal(x86_memory_operands(&in_64, tile, sizeof tile, operands), 16);
    assert_int_equal(operands[15].address, 0x80010 + 15 * 0x20000);
}

/* However the bytes end, nothing beyond them is looked at, and half an instruction is no answer. */
static void test_cut_off_encodings(void **state)
{
    (void)state;
    for (unsigned i = 0; i < sizeof table / sizeof *table; i++)
        for (size_t length = 0; length < X86_MAX_CODE; length++) {
            uint8_t *code = malloc(length + 1);        /* exact, for the sanitizer and valgrind */
            X86Operand operands[X86_MAX_OPERANDS];

            assert_non_null(code);
            memcpy(code + 1, table[i].code, length);
            x86_memory_operands(table[i].state, code + 1, length, operands);
            free(code);
        }
    for (unsigned i = 0; i < 15; i++) {
        static const uint8_t prefixes[15] = {0x66, 0x67, 0xf3, 0x2e, 0x66, 0x67, 0xf3, 0x2e,
                                             0x66, 0x67, 0xf3, 0x2e, 0x66, 0x67, 0xf3};
        X86Operand operands[X86_MAX_OPERANDS];

        assert_int_equal(x86_memory_operands(&in_64, prefixes, i, operands), 0);
    }
}

/* ---- the processor's answers ----------------------------------------------------------------- */

/* As in support.c, which needs all of libpcow. */
static uint64_t random_next(uint64_t *seed)
{
    *seed ^= *seed >> 12;
    *seed ^= *seed << 25;
    *seed ^= *seed >> 27;
    return *seed * UINT64_C(2685821657736338717);
}

static uint64_t number_from(const char *variable, uint64_t standard)
{
    const char *text = getenv(variable);

    return text ? strtoull(text, NULL, 0) : standard;
}

/* the code lies in the middle of 64 MiB without access: targets relative to it */
#define CODE_AREA (UINT64_C(0x20000000000))
#define CODE_AREA_SIZE (UINT64_C(64) << 20)
/* nothing is mapped here, nor at the low half of these addresses */
#define POINTERS (UINT64_C(0x10010000000))

static struct trial {
    uint64_t gpr[X86_GPRS];
    uint8_t *code;                     /* the instruction */
    sigjmp_buf back;
    int signal;
    bool store;
    uint64_t address;
} trial;

static void handle_signal(int signal, siginfo_t *info, void *opaque)
{
    const ucontext_t *context = opaque;

    trial.signal = signal;
    trial.store = signal == SIGSEGV && info->si_code > 0 && info->si_code != SI_KERNEL
                  && (context->uc_mcontext.gregs[REG_ERR] & 2)
                  && (uint8_t *)context->uc_mcontext.gregs[REG_RIP] == trial.code;
    trial.address = (uint64_t)info->si_addr;
    siglongjmp(trial.back, 1);
}

/*
 * A page of code: load the registers, stack pointer and all, then the instruction, then one that
 * ends it.
 */
static uint8_t *make_loader(void)
{
    static const uint8_t order[15] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    uint64_t values = (uint64_t)trial.gpr;
    uint8_t *area = mmap((void *)CODE_AREA, CODE_AREA_SIZE, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    uint8_t *page = area + CODE_AREA_SIZE / 2, *at = page;

    assert_ptr_equal(area, (void *)CODE_AREA);
    assert_int_equal(mprotect(page, 4096, PROT_READ | PROT_WRITE | PROT_EXEC), 0);
    *at++ = 0x48;                      /* movabs $values,%rax */
    *at++ = 0xb8;
    memcpy(at, &values, 8);
    at += 8;
    for (unsigned i = 0; i < sizeof order; i++) {          /* mov 8 * n(%rax),%reg */
        *at++ = order[i] & 8 ? 0x4c : 0x48;
        *at++ = 0x8b;
        *at++ = (uint8_t)(0x40 | (order[i] & 7) << 3);
        *at++ = (uint8_t)(8 * order[i]);
    }
    *at++ = 0x48;                      /* mov (%rax),%rax */
    *at++ = 0x8b;
    *at++ = 0x00;
    trial.code = at;
    return page;
}

static void run_instruction(const uint8_t *page, const uint8_t *code, size_t length)
{
    memset(trial.code, 0x90, 16);
    memcpy(trial.code, code, length);
    trial.code[length] = 0x0f;         /* ud2: it did not fault */
    trial.code[length + 1] = 0x0b;
    trial.store = false;
    if (sigsetjmp(trial.back, 0) == 0) {
        /* Masked stores shall store. */
        __asm__ volatile("pcmpeqd %%xmm0,%%xmm0; movdqa %%xmm0,%%xmm1; movdqa %%xmm0,%%xmm2; "
                         "movdqa %%xmm0,%%xmm3; cld" ::
                             : "xmm0", "xmm1", "xmm2", "xmm3");
        __asm__ volatile("jmp *%0" : : "r"(page));
        __builtin_unreachable();
    }
}

static void choose_registers(uint64_t *seed, const void *readable)
{
    for (unsigned i = 0; i < X86_GPRS; i++) {
        uint64_t r = random_next(seed);

        /* A pointer, or a small index of either sign. */
        trial.gpr[i] = r & 3 ? POINTERS + (r >> 8 & 0xffffff)
                             : (uint64_t)((int64_t)(r >> 8 & 0xffff) - 0x8000);
    }
    if (random_next(seed) & 1)
        trial.gpr[X86_SI] = (uint64_t)readable;
    trial.gpr[X86_SP] = POINTERS + (random_next(seed) & 0xffffff);
}

/*
 * Opcodes with ModRM, but for loads of what the test itself stands on (segment registers, the
 * control words of restored states).
 */
static bool is_one_byte_with_modrm(uint8_t op)
{
    if (op < 0x40)
        return (op & 7) < 4;
    return op == 0x63 || op == 0x69 || op == 0x6b || (op >= 0x80 && op <= 0x8d) || op == 0xc0
           || op == 0xc1 || op == 0xc6 || op == 0xc7 || (op >= 0xd0 && op <= 0xd3)
           || (op >= 0xd8 && op <= 0xdf) || op == 0xf6 || op == 0xf7 || op == 0xfe || op == 0xff;
}

static bool is_two_byte_with_modrm(uint8_t op)
{
    return op <= 0x04 || op == 0x0d || (op >= 0x10 && op <= 0x2f) || (op >= 0x40 && op <= 0x76)
           || (op >= 0x78 && op <= 0x7f) || (op >= 0x90 && op <= 0x9f) || (op >= 0xa3 && op <= 0xa5)
           || (op >= 0xab && op <= 0xad) || op == 0xaf || op == 0xb0 || op == 0xb1 || op == 0xb3
           || (op >= 0xb6 && op <= 0xc7) || op >= 0xd0;
}

static const uint8_t without_modrm[] = {0x50, 0x51, 0x53, 0x55, 0x57, 0x68, 0x6a, 0x9c,
                                        0xa2, 0xa3, 0xa4, 0xa5, 0xaa, 0xab, 0xc8, 0xe8};

static size_t add_modrm(uint8_t *code, uint64_t *seed)
{
    uint64_t r = random_next(seed);
    uint8_t modrm = (uint8_t)(r & 0x3f) | (uint8_t)((r >> 8) % 3 << 6), sib = (uint8_t)(r >> 16);
    int32_t displacement = (int32_t)((r >> 24 & 0xffffff) - 0x800000);
    size_t length = 0;

    code[length++] = modrm;
    if ((modrm & 7) == 4)
        code[length++] = sib;
    if (modrm >> 6 == 1) {
        code[length++] = (uint8_t)displacement;
    } else if (modrm >> 6 == 2 || (modrm & 7) == 5 || ((modrm & 7) == 4 && (sib & 7) == 5)) {
        memcpy(code + length, &displacement, 4);
        length += 4;
    }
    return length;
}

/* Immediates are the bytes that follow, whatever they are. */
static size_t make_legacy(uint8_t *code, uint64_t *seed)
{
    static const uint8_t prefixes[] = {0x66, 0x67, 0xf2, 0xf3, 0xf0, 0x3e};
    uint64_t r = random_next(seed);
    size_t length = 0;
    uint8_t op = (uint8_t)(r >> 16);

    for (unsigned i = 0; i < (r & 3) / 2; i++)
        code[length++] = prefixes[(r >> 2) % sizeof prefixes];
    if (r >> 40 & 1)
        code[length++] = (uint8_t)(0x40 | (r >> 41 & 15));
    switch (r >> 8 & 7) {
    case 0:
    case 1:
    case 2:
        if (!is_one_byte_with_modrm(op))
            return 0;
        code[length++] = op;
        break;
    case 3:
        code[length++] = without_modrm[op % sizeof without_modrm];
        r = POINTERS + (r >> 40);
        memcpy(code + length, &r, 8);
        return length + 8;
    case 4:
    case 5:
        if (!is_two_byte_with_modrm(op))
            return 0;
        code[length++] = 0x0f;
        code[length++] = op;
        break;
    default:
        code[length++] = 0x0f;
        code[length++] = r >> 8 & 1 ? 0x38 : 0x3a;
        code[length++] = op;
        break;
    }
    return length + add_modrm(code + length, seed) + 4;
}

static size_t make_vector(uint8_t *code, uint64_t *seed)
{
    uint64_t r = random_next(seed);
    uint8_t op = (uint8_t)(r >> 24);
    size_t length = 0;

    if (r & 1) {
        code[length++] = 0xc4;
        code[length++] = (uint8_t)((r >> 8 & 0xe0) | (1 + (r >> 4) % 3));
        code[length++] = (uint8_t)((r >> 16 & 0x87) | 0x78);
    } else {
        code[length++] = 0x62;
        code[length++] = (uint8_t)((r >> 8 & 0xf0) | (1 + (r >> 4) % 3));
        code[length++] = (uint8_t)((r >> 16 & 0x83) | 0x7c);
        code[length++] = (uint8_t)((r >> 32 & 0x60) | 0x08);   /* no mask, no broadcast */
    }
    if (op == 0x77)
        return 0;                      /* the only ones without ModRM */
    code[length++] = op;
    return length + add_modrm(code + length, seed) + 4;
}

static bool is_scatter(const uint8_t *code)
{
    return code[0] == 0x62 && (code[1] & 7) == 2
           && ((code[4] >= 0xa0 && code[4] <= 0xa3) || code[4] == 0xc6 || code[4] == 0xc7);
}

static void compare(const uint8_t *code)
{
    X86State state = {.ip = (uint64_t)trial.code, .code_bits = 64, .stack_bits = 64};
    X86Operand operands[X86_MAX_OPERANDS];
    unsigned count;
    char text[64] = "";

    memcpy(state.gpr, trial.gpr, sizeof state.gpr);
    count = x86_memory_operands(&state, trial.code, X86_MAX_CODE, operands);
    if (count && operands[0].store && trial.address >= operands[0].address
        && trial.address - operands[0].address < operands[0].length)
        return;
    for (unsigned i = 0; i < X86_MAX_CODE; i++)
        snprintf(text + 3 * i, 4, "%02x ", trial.code[i]);
    fail_msg("%sstored to 0x%llx, not to 0x%llx (%u operands; from %02x)", text,
             (unsigned long long)trial.address, count ? (unsigned long long)operands[0].address : 0,
             count, code[0]);
}

static void test_against_the_processor(void **state)
{
    static const int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP};
    static const uint8_t readable[4096];
    struct sigaction action = {.sa_sigaction = handle_signal,
                               .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    struct sigaction previous[sizeof signals / sizeof *signals];
    stack_t stack = {.ss_sp = malloc(1 << 16), .ss_size = 1 << 16}, none = {.ss_flags = SS_DISABLE};
    uint64_t seed = number_from("PCOW_TEST_SEED", UINT64_C(0x5eed0123456789)) | 1;
    unsigned stores = 0, vector_stores = 0,
             steps = (unsigned)number_from("PCOW_TEST_STEPS", 400000);
    uint8_t *page = make_loader();

    (void)state;
    assert_non_null(stack.ss_sp);
    assert_int_equal(sigaltstack(&stack, NULL), 0);
    for (unsigned i = 0; i < sizeof signals / sizeof *signals; i++)
        assert_int_equal(sigaction(signals[i], &action, &previous[i]), 0);
    for (unsigned i = 0; i < steps; i++) {
        uint8_t code[32];
        size_t length;

        /* harmless when an instruction does not fault and what follows is executed */
        memset(code, 0xcc, sizeof code);
        length = i % 3 ? make_legacy(code, &seed) : make_vector(code, &seed);
        if (length == 0 || length > X86_MAX_CODE)
            continue;
        choose_registers(&seed, readable);
        run_instruction(page, code, length);
        if (!trial.store || is_scatter(code))
            continue;
        compare(code);
        stores++;
        vector_stores += i % 3 == 0;
    }
    for (unsigned i = 0; i < sizeof signals / sizeof *signals; i++)
        sigaction(signals[i], &previous[i], NULL);
    sigaltstack(&none, NULL);
    free(stack.ss_sp);
    munmap((void *)CODE_AREA, CODE_AREA_SIZE);
    print_message("%u stores compared, %u of them of vectors\n", stores, vector_stores);
    /* A processor without AVX-512 refuses most of the vector stores that are made. */
    assert_true(stores > steps / 50
                && vector_stores > steps / (__builtin_cpu_supports("avx512f") ? 1000 : 2000));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known_encodings),
        cmocka_unit_test(test_second_operands),
        cmocka_unit_test(test_cut_off_encodings),
        cmocka_unit_test(test_against_the_processor),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* SPDX-License-Identifier: BSD-3-Clause */
#include "machine/stub.h"

#include <string.h>

#define PAGE ((uint64_t)4096)
#define LARGE_PAGE ((uint64_t)2 << 20)
#define GIB 4 /* what is mapped */
/* Entries of page tables. */
#define PRESENT 1u
#define WRITABLE 2u
#define LARGE 0x80u
/* Pages of the stub: code, tables of levels 5, 4, 3, and a table of level 2 for each GiB. */
#define TABLE_5 1
#define TABLE_4 2
#define TABLE_3 3
#define TABLE_2 4

_Static_assert((TABLE_2 + GIB) * PAGE == STUB_SIZE, "the stub has its pages");

/*
 * What runs first, in 64-bit mode and in memory that is mapped where it is: descriptors as the boot
 * protocol wants them, the zero page in %rsi, then the kernel. The numbers are filled in.
 *
 * It has page tables of its own. Those it is entered with are in memory of the old kernel, and that
 * may be where the new one unpacks itself.
 */
__asm__(".pushsection .rodata\n"
        ".balign 8\n"
        "stub_begin:\n"
        "    lgdt stub_gdt_pointer(%rip)\n"
        "    movl $0x18, %eax\n"
        "    movl %eax, %ds\n"
        "    movl %eax, %es\n"
        "    movl %eax, %ss\n"
        "    movl %eax, %fs\n"
        "    movl %eax, %gs\n"
        "    leaq stub_begin+4096(%rip), %rsp\n"
        "    movq stub_tables(%rip), %rax\n"
        "    movq %cr4, %rcx\n"
        "    btl $12, %ecx\n" /* LA57: five levels, which cannot be changed here */
        "    jc 1f\n"
        "    addq $4096, %rax\n"
        "1:  movq %rax, %cr3\n"
        "    movq stub_params(%rip), %rsi\n"
        "    movq stub_entry(%rip), %rax\n"
        "    pushq $0x10\n"
        "    pushq %rax\n"
        "    xorl %ebx, %ebx\n"
        "    lretq\n"
        ".balign 8\n"
        "stub_gdt:\n"
        "    .quad 0, 0, 0x00af9a000000ffff, 0x00cf92000000ffff\n"
        "    .word 0, 0, 0\n"
        "stub_gdt_pointer:\n"
        "    .word 31\n"
        "    .quad 0\n"
        ".balign 8\n"
        "stub_tables: .quad 0\n"
        "stub_params: .quad 0\n"
        "stub_entry: .quad 0\n"
        "stub_end:\n"
        ".popsection\n");
extern const unsigned char stub_begin[], stub_gdt[], stub_gdt_pointer[], stub_tables[],
    stub_params[], stub_entry[], stub_end[];

void put32(unsigned char *at, uint64_t value)
{
    for (unsigned i = 0; i < 4; i++)
        at[i] = (unsigned char)(value >> (8 * i));
}

void put64(unsigned char *at, uint64_t value)
{
    put32(at, value);
    put32(at + 4, value >> 32);
}

/* Each address is mapped to itself. */
static void fill_tables(unsigned char *stub, uint64_t address)
{
    put64(stub + TABLE_5 * PAGE, (address + TABLE_4 * PAGE) | PRESENT | WRITABLE);
    put64(stub + TABLE_4 * PAGE, (address + TABLE_3 * PAGE) | PRESENT | WRITABLE);
    for (unsigned i = 0; i < GIB; i++)
        put64(stub + TABLE_3 * PAGE + i * 8u,
              (address + (TABLE_2 + i) * PAGE) | PRESENT | WRITABLE);
    for (unsigned i = 0; i < GIB * 512u; i++)
        put64(stub + TABLE_2 * PAGE + i * 8u, i * LARGE_PAGE | PRESENT | WRITABLE | LARGE);
}

void stub_make(unsigned char stub[STUB_SIZE], uint64_t address, uint64_t params, uint64_t entry)
{
    memcpy(stub, stub_begin, (size_t)(stub_end - stub_begin));
    put64(stub + (stub_gdt_pointer - stub_begin) + 2,
          address + (uint64_t)(stub_gdt - stub_begin));
    put64(stub + (stub_tables - stub_begin), address + TABLE_5 * PAGE);
    put64(stub + (stub_params - stub_begin), params);
    put64(stub + (stub_entry - stub_begin), entry);
    fill_tables(stub, address);
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Firmware of 64 KiB, in place of a guest. The first CPU wakes the second one, which reads a port to 0x50000 with
 * an instruction that KVM emulates, and then halts. All addresses are offsets in the segment at 0xf0000.
 *
 * as --32 -o two-cpus.o two-cpus.S; ld -m elf_i386 -Ttext 0 --oformat binary -o two-cpus.bin two-cpus.o
 */
    .set LOCAL_APIC, 0xfee00000
    .set SPURIOUS, 0xf0
    .set COMMAND, 0x300
    .code16
    .globl _start
_start:                                 /* the second CPU: its start vector is 0xf0 */
    movw $0x5000, %ax
    movw %ax, %es
    xorw %di, %di
    movw $0x80, %dx
    movw $4096, %cx
    cld
    rep insb
1:  hlt
    jmp 1b

first:                                  /* the registers of the APIC are above 1 MiB */
    lgdtl %cs:table_place
    movl %cr0, %eax
    orb $1, %al
    movl %eax, %cr0
    ljmpl $8, $0xf0000 + protected
    .code32
protected:
    movw $16, %ax
    movw %ax, %ds
    movl $0x1ff, LOCAL_APIC + SPURIOUS
    movl $0x000c4500, LOCAL_APIC + COMMAND          /* INIT, to all others */
    movl $100000, %ecx
2:  loop 2b
    movl $0x000c46f0, LOCAL_APIC + COMMAND          /* start */
3:  hlt
    jmp 3b

    .align 8
table:
    .quad 0, 0x00cf9b000000ffff, 0x00cf93000000ffff
table_place:
    .word 23
    .long 0xf0000 + table

    .org 0xfff0                         /* where the first one begins */
    .code16
    ljmp $0xf000, $first
    .org 0xffff
    .byte 0

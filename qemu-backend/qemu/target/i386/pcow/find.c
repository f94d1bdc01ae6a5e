/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Which access of a vCPU under KVM was refused?
 *
 * KVM says so in few kernels.  Else it is found out from the instruction, or
 * guessed: from the page tables that the processor went through, from what it
 * stores to when it delivers an interrupt, from the registers.
 */
#include "qemu/osdep.h"
#include <linux/kvm.h>
#include <pcow.h>
#include "cpu.h"
#include "hw/core/cpu.h"
#include "system/hostmem-pcow.h"
#include "system/kvm.h"
#include "system/pcow-compat.h"
#include "fault.h"
#include "x86.h"

AddressSpace *hostmem_pcow_kvm_memory(CPUState *cpu)
{
    return cpu->kvm_run->flags & KVM_RUN_X86_SMM
        ? cpu_get_address_space(cpu, X86ASIdx_SMM) : &address_space_memory;
}

uint8_t *hostmem_pcow_find_ram(AddressSpace *memory, hwaddr gpa,
                               RAMBlock **block, uint64_t *offset)
{
    hwaddr length = 1, at;
    MemoryRegion *mr = address_space_translate(memory, gpa, &at, &length, false,
                                               MEMTXATTRS_UNSPECIFIED);

    if (!memory_region_is_ram(mr) || !mr->ram_block) {
        return NULL;
    }
    *block = mr->ram_block;
    *offset = at;
    return (uint8_t *)memory_region_get_ram_ptr(mr) + at;
}

/* The fault that this thread looks at */
static __thread struct {
    struct kvm_sregs sregs;
    AddressSpace *memory;
    bool again;                 /* the vCPU has come back unchanged */
    /* The first page table on the way that may not be stored to */
    HostMemPcowAccess refused_table;
} fault;

/* Would this access to guest-physical memory be refused, and by which page? */
static bool is_refused_physical(hwaddr gpa, bool store,
                                HostMemPcowAccess *access)
{
    RAMBlock *block;
    uint64_t offset;
    uint8_t *host = hostmem_pcow_find_ram(fault.memory, gpa, &block, &offset);
    bool lost = false;

    if (!host || !block->pcow) {
        return false;
    }
    /*
     * Nobody stores to a read-only image: to what a guess takes for a store,
     * all that can be loaded from is accessible.
     */
    store = store && !block->pcow->readonly;
    if (pcow_map_is_accessible(block->pcow->map, offset, store)) {
        lost = !hostmem_pcow_can_load(host);
        if (!lost) {
            return false;
        }
    }
    *access = (HostMemPcowAccess) { block->pcow, offset, store, lost };
    return true;
}

/*
 * Let the access pass, if there is one.  Where that takes space which is not
 * left, and it may not be what was refused, there may be others: then it is
 * forgotten.
 */
static bool try_access(HostMemPcowAccess *access, bool certain)
{
    HostMemPcow *pcow = access->pcow;

    if (!pcow) {
        return false;
    }
    access->certain = certain;
    if (access->lost ||
        hostmem_pcow_resolve(pcow, access->offset, 1, access->store,
                             false) != -ENOSPC) {
        return true;
    }
    if (access->store &&
        !pcow_map_is_accessible(pcow->map, access->offset, false)) {
        /* Perhaps it was to be loaded from, which takes none. */
        access->store = false;
        if (hostmem_pcow_resolve(pcow, access->offset, 1, false,
                                 false) != -ENOSPC) {
            return true;
        }
    }
    /* Of an operand it is only known that it may be stored to: see again. */
    if (certain && (!access->store || fault.again)) {
        return true;
    }
    *access = (HostMemPcowAccess) { };
    return false;
}

/* Perhaps it was a page table on the way to what was looked at. */
static bool guess_table(HostMemPcowAccess *access)
{
    *access = fault.refused_table;
    fault.refused_table = (HostMemPcowAccess) { };
    return try_access(access, false);
}

#define PTE_ADDRESS 0x000ffffffffff000ULL
/* The task state and the frame of an interrupt in 64-bit mode */
#define TSS_RSP0 4
#define TSS_LENGTH 104
#define FRAME_ALIGN 16
#define FRAME_LENGTH 48

/*
 * The page tables of a guest in 64-bit mode.  KVM_TRANSLATE looks as the kernel
 * of the guest would, and so does not find pages of its programs where SMAP
 * is on.
 *
 * Where the processor walks the tables through those of the host, it stores to
 * each (AMD) or says that it does (Intel, where it keeps accessed and dirty
 * bits there).  So a table that may not be stored to is perhaps what was
 * refused: the first is kept for guess_table().  One that may not be loaded
 * from is it: then false, and *access says so.
 */
static bool walk_page_tables(uint64_t linear, hwaddr *gpa,
                             HostMemPcowAccess *access)
{
    hwaddr table = fault.sregs.cr3 & PTE_ADDRESS;
    int levels = fault.sregs.cr4 & CR4_LA57_MASK ? 5 : 4;

    for (int level = levels; level > 0; level--) {
        unsigned shift = 12 + 9 * (level - 1);
        uint64_t mask = (1ULL << shift) - 1, entry, offset;
        RAMBlock *block;
        hwaddr at = table + (linear >> shift & 511) * 8;
        uint8_t *host = hostmem_pcow_find_ram(fault.memory, at, &block,
                                              &offset);

        if (!host || is_refused_physical(at, false, access)) {
            return false;
        }
        if (!fault.refused_table.pcow) {
            is_refused_physical(at, true, &fault.refused_table);
        }
        entry = ldq_le_p(host);
        if (!(entry & PG_PRESENT_MASK)) {
            return false;
        }
        if (level == 1 || (level <= 3 && entry & PG_PSE_MASK)) {
            *gpa = (entry & PTE_ADDRESS & ~mask) | (linear & mask);
            return true;
        }
        table = entry & PTE_ADDRESS;
    }
    return false;
}

/* If false, *access may say why. */
static bool translate(CPUState *cpu, uint64_t linear, hwaddr *gpa,
                      HostMemPcowAccess *access)
{
    struct kvm_translation translation = { .linear_address = linear };

    if (fault.sregs.efer & MSR_EFER_LMA) {
        return walk_page_tables(linear, gpa, access);
    }
    if (kvm_vcpu_ioctl(cpu, KVM_TRANSLATE, &translation) < 0 ||
        !translation.valid) {
        return false;
    }
    *gpa = translation.physical_address;
    return true;
}

/* @certain: the instruction does access it. */
static bool is_refused(CPUState *cpu, uint64_t linear, uint64_t length,
                       bool store, bool certain, HostMemPcowAccess *access)
{
    uint64_t page = linear & ~(PCOW_PAGE_SIZE - 1);
    uint64_t last = (linear + MAX(length, 1) - 1) & ~(PCOW_PAGE_SIZE - 1);
    hwaddr gpa;

    /* The last page may be that of the address space (a register with -1). */
    for (;; page += PCOW_PAGE_SIZE) {
        if (translate(cpu, page, &gpa, access)) {
            is_refused_physical(gpa, store, access);
        }
        if (try_access(access, certain) ||
            (!certain && guess_table(access))) {
            return true;
        }
        if (page == last) {
            return false;
        }
    }
}

static void get_state(const struct kvm_regs *regs, X86State *state)
{
    *state = (X86State) {
        .gpr = {
            regs->rax, regs->rcx, regs->rdx, regs->rbx,
            regs->rsp, regs->rbp, regs->rsi, regs->rdi,
            regs->r8, regs->r9, regs->r10, regs->r11,
            regs->r12, regs->r13, regs->r14, regs->r15,
        },
        .ip = regs->rip,
        .base = {
            fault.sregs.es.base, fault.sregs.cs.base, fault.sregs.ss.base,
            fault.sregs.ds.base, fault.sregs.fs.base, fault.sregs.gs.base,
        },
        .code_bits = fault.sregs.cs.l ? 64 : fault.sregs.cs.db ? 32 : 16,
        .stack_bits = fault.sregs.cs.l ? 64 : fault.sregs.ss.db ? 32 : 16,
    };
}

/*
 * The bytes of the instruction.  If they are in an image and not mapped,
 * fetching them is what failed: then *access says so.
 */
static size_t read_code(CPUState *cpu, const X86State *state, uint8_t *code,
                        HostMemPcowAccess *access)
{
    uint64_t linear = state->ip;
    size_t done = 0;

    if (state->code_bits != 64) {
        linear = (uint32_t)(state->base[X86_CS] + state->ip);
    }
    while (done < X86_MAX_CODE) {
        size_t length = PCOW_PAGE_SIZE - (linear + done) % PCOW_PAGE_SIZE;
        RAMBlock *block;
        uint64_t offset;
        uint8_t *host;
        hwaddr gpa;

        if (!translate(cpu, linear + done, &gpa, access) ||
            is_refused_physical(gpa, false, access)) {
            break;
        }
        host = hostmem_pcow_find_ram(fault.memory, gpa, &block, &offset);
        if (!host) {
            break;
        }
        length = MIN(length, X86_MAX_CODE - done);
        memcpy(code + done, host, length);
        done += length;
    }
    return done;
}

/* The instruction itself, or an operand of it */
static bool find_by_instruction(CPUState *cpu, const X86State *state,
                                HostMemPcowAccess *access)
{
    X86Operand operands[X86_MAX_OPERANDS];
    uint8_t code[X86_MAX_CODE];
    unsigned count;
    size_t length = read_code(cpu, state, code, access);

    if (try_access(access, true)) {
        return true;
    }
    count = x86_memory_operands(state, code, length, operands);
    for (unsigned i = 0; i < count; i++) {
        if (is_refused(cpu, operands[i].address, operands[i].length,
                       operands[i].store, true, access)) {
            return true;
        }
    }
    return false;
}

/* In 64-bit mode: where a program's stack is left for, without an error 0 */
static uint64_t read_kernel_stack(CPUState *cpu)
{
    uint64_t linear = fault.sregs.tr.base + TSS_RSP0, offset;
    HostMemPcowAccess ignored;  /* that was looked at before, in vain */
    RAMBlock *block;
    uint8_t *host;
    hwaddr gpa;

    /* Elsewhere the next page is not that of the guest. */
    if (linear % PCOW_PAGE_SIZE > PCOW_PAGE_SIZE - sizeof(uint64_t) ||
        !translate(cpu, linear, &gpa, &ignored) ||
        is_refused_physical(gpa, false, &ignored)) {
        return 0;
    }
    host = hostmem_pcow_find_ram(fault.memory, gpa, &block, &offset);
    return host ? ldq_le_p(host) : 0;
}

/*
 * Perhaps the processor was delivering an interrupt or an exception: then it
 * went through page tables to the descriptors, and stored to the stack.  Not
 * the stacks of the interrupt stack table, which are used rarely.
 */
static bool guess_by_delivery(CPUState *cpu, const X86State *state,
                              HostMemPcowAccess *access)
{
    uint64_t stack = state->gpr[X86_SP];

    if (!(fault.sregs.efer & MSR_EFER_LMA)) {
        return false;
    }
    if (is_refused(cpu, fault.sregs.idt.base, fault.sregs.idt.limit, false,
                   false, access) ||
        is_refused(cpu, fault.sregs.gdt.base, fault.sregs.gdt.limit, false,
                   false, access) ||
        is_refused(cpu, fault.sregs.tr.base, TSS_LENGTH, false, false,
                   access)) {
        return true;
    }
    if (fault.sregs.ss.dpl == 3) {
        stack = read_kernel_stack(cpu);
    }
    stack &= ~(uint64_t)(FRAME_ALIGN - 1);
    return stack && is_refused(cpu, stack - FRAME_LENGTH, FRAME_LENGTH, true,
                               false, access);
}

/*
 * Perhaps a register points to it.  The price of an error is a page copied, or
 * nothing if there is no space for that.
 */
static bool guess_by_registers(CPUState *cpu, const X86State *state,
                               HostMemPcowAccess *access)
{
    for (unsigned i = 0; i < X86_GPRS; i++) {
        uint64_t address = state->gpr[i];

        if (i == X86_SP) {
            address -= 8;
        }
        if (state->code_bits != 64) {
            address = (uint32_t)(state->base[i == X86_SP ? X86_SS : X86_DS] +
                                 address);
        }
        if (is_refused(cpu, address, 1, true, false, access)) {
            return true;
        }
    }
    return false;
}

/*
 * While a nested guest runs, the registers are its, and its addresses lead
 * elsewhere.  KVM tells since Linux 6.10, unasked.
 */
static bool is_in_nested_guest(const struct kvm_run *run)
{
#ifdef KVM_RUN_X86_GUEST_MODE
    return run->flags & KVM_RUN_X86_GUEST_MODE;
#else
    return false;
#endif
}

bool hostmem_pcow_kvm_find_access(CPUState *cpu, const struct kvm_regs *regs,
                                  bool again, HostMemPcowAccess *access)
{
    struct kvm_run *run = cpu->kvm_run;
    X86State state;

    *access = (HostMemPcowAccess) { };
    fault.memory = hostmem_pcow_kvm_memory(cpu);
    fault.again = again;
    fault.refused_table = (HostMemPcowAccess) { };
    if (kvm_vcpu_ioctl(cpu, KVM_GET_SREGS, &fault.sregs) < 0) {
        return false;
    }
    get_state(regs, &state);
    if (run->exit_reason == KVM_EXIT_MEMORY_FAULT &&
        is_refused_physical(run->memory_fault.gpa, true, access) &&
        try_access(access, true)) {
        return true;
    }
    if (is_in_nested_guest(run)) {
        return false;
    }
    return find_by_instruction(cpu, &state, access) ||
           /* if all is well, another vCPU may just have been faster */
           (again &&
            (guess_table(access) ||
             guess_by_delivery(cpu, &state, access) ||
             guess_by_registers(cpu, &state, access)));
}

/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * A vCPU under KVM that stores to a page of a pcow image that must be copied
 * first.
 *
 * The page is mapped read-only, so KVM_RUN returns -EFAULT, in most kernels
 * without an address.  The instruction has not been executed: make the page
 * writable and run the vCPU again.  Where it was is guessed from the
 * instruction and the registers, which costs a few ioctls; what cannot be
 * guessed (some of the stores that the processor makes by itself; scattered
 * vectors) is found by userfaultfd, see pcow_map_watch().
 *
 * The image may be unplugged meanwhile.  One that was found in the memory of
 * the guest stays as long as RCU is held (the flat view has a reference), one
 * from the list of RAM blocks as long as the images are locked.
 */
#include "qemu/osdep.h"
#include <linux/kvm.h>
#include <pcow.h>
#include "cpu.h"
#include "exec/address-spaces.h"
#include "exec/cpu-common.h"
#include "exec/memory.h"
#include "exec/ramblock.h"
#include "exec/ramlist.h"
#include "hw/core/cpu.h"
#include "qapi/qapi-events-pcow.h"
#include "qemu/error-report.h"
#include "qemu/main-loop.h"
#include "qemu/rcu.h"
#include "system/hostmem-pcow.h"
#include "system/kvm.h"
#include "system/runstate.h"
#include "hostmem-pcow-kvm.h"
#include "hostmem-pcow-x86.h"

#define RETRY_INTERVAL_NS (10 * 1000 * 1000)

/*
 * How often a vCPU may come back with the same registers before we give up:
 * without a store of anybody being served meanwhile, which may have cost us
 * the watch; and in all
 */
#define MAX_TRIES_ALONE 10
#define MAX_TRIES 1000
/*
 * A try after so long is the first one: the vCPU has been somewhere else, and
 * has the same registers again, as in a loop.
 */
#define TRIES_APART_NS (100 * 1000 * 1000)

/* A vCPU that stays where it is */
static __thread struct {
    struct kvm_regs regs;
    unsigned tries, tries_alone;
    uint64_t served;
    int64_t at;
} stuck;

typedef struct Access {
    HostMemPcow *pcow;          /* NULL: none has been found */
    uint64_t offset;
    bool store;
    bool lost;                  /* a media error, or a file cut short */
    /*
     * It is what was refused.  Else it is a guess: to serve it may help, but
     * that there is no space for it says nothing of what the guest did.
     */
    bool certain;
} Access;

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

/* Of the fault that this thread looks at */
static __thread struct kvm_sregs sregs;
static __thread AddressSpace *memory;
/* The first page table on the way that may not be stored to */
static __thread Access refused_table;

/* Would this access to guest-physical memory be refused, and by which page? */
static bool is_refused_physical(hwaddr gpa, bool store, Access *access)
{
    RAMBlock *block;
    uint64_t offset;
    uint8_t *host = hostmem_pcow_find_ram(memory, gpa, &block, &offset);
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
    *access = (Access) { block->pcow, offset, store, lost };
    return true;
}

/*
 * Is this access, if there is one, to be served?  Where no space is left that
 * has to be asked now, as there may be others; if not, it is forgotten.
 */
static bool is_worth_serving(Access *access, bool certain)
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
    if (certain && (!access->store || stuck.tries)) {
        return true;
    }
    *access = (Access) { };
    return false;
}

/* Perhaps it was a page table on the way to what was looked at. */
static bool guess_table(Access *access)
{
    *access = refused_table;
    refused_table = (Access) { };
    return is_worth_serving(access, false);
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
static bool walk_page_tables(uint64_t linear, hwaddr *gpa, Access *access)
{
    hwaddr table = sregs.cr3 & PTE_ADDRESS;

    for (int level = sregs.cr4 & CR4_LA57_MASK ? 5 : 4; level > 0; level--) {
        unsigned shift = 12 + 9 * (level - 1);
        uint64_t mask = (1ULL << shift) - 1, entry, offset;
        RAMBlock *block;
        hwaddr at = table + (linear >> shift & 511) * 8;
        uint8_t *host = hostmem_pcow_find_ram(memory, at, &block, &offset);

        if (!host || is_refused_physical(at, false, access)) {
            return false;
        }
        if (!refused_table.pcow) {
            is_refused_physical(at, true, &refused_table);
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
                      Access *access)
{
    struct kvm_translation translation = { .linear_address = linear };

    if (sregs.efer & MSR_EFER_LMA) {
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
                       bool store, bool certain, Access *access)
{
    uint64_t page = linear & ~(PCOW_PAGE_SIZE - 1);
    uint64_t last = (linear + MAX(length, 1) - 1) & ~(PCOW_PAGE_SIZE - 1);
    hwaddr gpa;

    /* The last page may be that of the address space (a register with -1). */
    for (;; page += PCOW_PAGE_SIZE) {
        if (translate(cpu, page, &gpa, access)) {
            is_refused_physical(gpa, store, access);
        }
        if (is_worth_serving(access, certain) ||
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
            sregs.es.base, sregs.cs.base, sregs.ss.base,
            sregs.ds.base, sregs.fs.base, sregs.gs.base,
        },
        .code_bits = sregs.cs.l ? 64 : sregs.cs.db ? 32 : 16,
        .stack_bits = sregs.cs.l ? 64 : sregs.ss.db ? 32 : 16,
    };
}

/*
 * The bytes of the instruction.  If they are in an image and not mapped,
 * fetching them is what failed: then *access says so.
 */
static size_t read_code(CPUState *cpu, const X86State *state, uint8_t *code,
                        Access *access)
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
        host = hostmem_pcow_find_ram(memory, gpa, &block, &offset);
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
                                Access *access)
{
    X86Operand operands[X86_MAX_OPERANDS];
    uint8_t code[X86_MAX_CODE];
    unsigned count;
    size_t length = read_code(cpu, state, code, access);

    if (is_worth_serving(access, true)) {
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
    uint64_t linear = sregs.tr.base + TSS_RSP0, offset;
    Access ignored;             /* that was looked at before, in vain */
    RAMBlock *block;
    uint8_t *host;
    hwaddr gpa;

    /* Elsewhere the next page is not that of the guest. */
    if (linear % PCOW_PAGE_SIZE > PCOW_PAGE_SIZE - sizeof(uint64_t) ||
        !translate(cpu, linear, &gpa, &ignored) ||
        is_refused_physical(gpa, false, &ignored)) {
        return 0;
    }
    host = hostmem_pcow_find_ram(memory, gpa, &block, &offset);
    return host ? ldq_le_p(host) : 0;
}

/*
 * Perhaps the processor was delivering an interrupt or an exception: then it
 * went through page tables to the descriptors, and stored to the stack.  Not
 * the stacks of the interrupt stack table, which are used rarely.
 */
static bool guess_by_delivery(CPUState *cpu, const X86State *state,
                              Access *access)
{
    uint64_t stack = state->gpr[X86_SP];

    if (!(sregs.efer & MSR_EFER_LMA)) {
        return false;
    }
    if (is_refused(cpu, sregs.idt.base, sregs.idt.limit, false, false,
                   access) ||
        is_refused(cpu, sregs.gdt.base, sregs.gdt.limit, false, false,
                   access) ||
        is_refused(cpu, sregs.tr.base, TSS_LENGTH, false, false, access)) {
        return true;
    }
    if (sregs.ss.dpl == 3) {
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
                               Access *access)
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

static bool find_access(CPUState *cpu, Access *access)
{
    struct kvm_run *run = cpu->kvm_run;
    struct kvm_regs regs;
    X86State state;

    memory = hostmem_pcow_kvm_memory(cpu);
    refused_table = (Access) { };
    if (kvm_vcpu_ioctl(cpu, KVM_GET_REGS, &regs) < 0 ||
        kvm_vcpu_ioctl(cpu, KVM_GET_SREGS, &sregs) < 0) {
        return false;
    }
    get_state(&regs, &state);
    if (memcmp(&regs, &stuck.regs, sizeof(regs)) ||
        get_clock() - stuck.at > TRIES_APART_NS) {
        stuck.regs = regs;
        stuck.tries = stuck.tries_alone = 0;
    }
    if (run->exit_reason == KVM_EXIT_MEMORY_FAULT &&
        is_refused_physical(run->memory_fault.gpa, true, access) &&
        is_worth_serving(access, true)) {
        return true;
    }
    if (is_in_nested_guest(run)) {
        return false;
    }
    return find_by_instruction(cpu, &state, access) ||
           /* if all is well, another vCPU may just have been faster */
           (stuck.tries &&
            (guess_table(access) ||
             guess_by_delivery(cpu, &state, access) ||
             guess_by_registers(cpu, &state, access)));
}

/*
 * The vCPU cannot go on, but whoever removes the cause can let it try again
 * (cont), which an internal error would not allow.
 */
static int stop_vm(void)
{
    bql_lock();
    vm_stop(RUN_STATE_IO_ERROR);
    bql_unlock();
    return EXCP_INTERRUPT;
}

/* Returns true if there is no space, which is to be waited for. */
static bool serve(CPUState *cpu, const Access *access)
{
    uint8_t *host = (uint8_t *)pcow_map_address(access->pcow->map) +
                    access->offset;
    int ret = access->lost ? -EIO : hostmem_pcow_trap(host, access->store);

    if (ret == 0) {
        stuck.tries = stuck.tries_alone = 0;
    } else if (ret == -ENOSPC && !access->certain) {
        /* Gone since it was looked at: the vCPU comes back. */
    } else if (ret == -ENOSPC && !hostmem_pcow_fails_when_full(host)) {
        return true;
    } else {
        hostmem_pcow_memory_error(cpu, host, ret);
    }
    return false;
}

/* Finds it, and serves it before the image can go away. */
static bool serve_found(CPUState *cpu, bool *is_full)
{
    Access access = { };

    RCU_READ_LOCK_GUARD();
    if (!find_access(cpu, &access)) {
        return false;
    }
    *is_full = serve(cpu, &access);
    return true;
}

/*
 * A store that a watch has found, but could not serve; not one of long ago, as
 * this vCPU has begun a watch.  The list of blocks keeps no image, and the
 * guest may not see this one any more.
 */
static bool serve_watched(CPUState *cpu, bool *is_full)
{
    bool found = false;
    RAMBlock *block;

    RCU_READ_LOCK_GUARD();
    hostmem_pcow_lock_images();
    RAMBLOCK_FOREACH(block) {
        uint64_t offset;

        if (block->pcow && pcow_map_watch_found(block->pcow->map, &offset) &&
            !pcow_map_is_accessible(block->pcow->map, offset, true)) {
            *is_full = serve(cpu, &(Access) {
                block->pcow, offset, .store = true, .certain = true,
            });
            found = true;
            break;
        }
    }
    hostmem_pcow_unlock_images();
    return found;
}

/* Stores that were served so far, in all images */
static uint64_t count_served(void)
{
    uint64_t served = 0;
    RAMBlock *block;

    RCU_READ_LOCK_GUARD();
    hostmem_pcow_lock_images();
    RAMBLOCK_FOREACH(block) {
        if (block->pcow) {
            struct pcow_map_stats stats;

            pcow_map_get_stats(block->pcow->map, &stats);
            served += stats.write_traps +
                      qatomic_read(&block->pcow->write_traps);
        }
    }
    hostmem_pcow_unlock_images();
    return served;
}

/* The vCPU comes back unchanged.  Is there nothing left to try? */
static bool is_hopeless(void)
{
    uint64_t served = count_served();

    stuck.tries++;
    stuck.tries_alone++;
    if (served != stuck.served) {
        stuck.served = served;
        stuck.tries_alone = 0;
    }
    return stuck.tries > MAX_TRIES || stuck.tries_alone > MAX_TRIES_ALONE;
}

/* Let userfaultfd find out.  Returns 0 if that has begun. */
static int watch_all(CPUState *cpu)
{
    g_autofree char *id = NULL;
    struct pcow_error error;
    RAMBlock *block;
    int ret = -EFAULT;

    WITH_RCU_READ_LOCK_GUARD() {
        hostmem_pcow_lock_images();
        RAMBLOCK_FOREACH(block) {
            if (block->pcow && !block->pcow->readonly) {
                ret = hostmem_pcow_watch(block->pcow, &error);
                if (ret < 0) {
                    id = g_strdup(block->pcow->id);
                    break;
                }
            }
        }
        hostmem_pcow_unlock_images();
    }
    if (!id) {
        return ret;
    }
    stuck.tries = 1;
    stuck.tries_alone = 0;
    error_report("vCPU %d stores to a page of a pcow image that must be copied "
                 "first, but KVM does not say to which, and %s. The VM is "
                 "paused and nothing is lost: remove the cause, and continue",
                 cpu->cpu_index, error.message);
    bql_lock();
    qapi_event_send_pcow_error(id, 0, error.message);
    bql_unlock();
    return stop_vm();
}

int hostmem_pcow_kvm_fault(CPUState *cpu)
{
    struct timespec interval = { 0, RETRY_INTERVAL_NS };
    bool is_full = false;
    int ret = 0;

    if (!hostmem_pcow_high) {
        return -EFAULT;
    }
    if (serve_found(cpu, &is_full) ||
        (stuck.tries > 1 && serve_watched(cpu, &is_full))) {
        if (is_full) {
            /* kicks of the vCPU end this early, and the loop sees to them */
            nanosleep(&interval, NULL);
        }
    } else if (is_hopeless()) {
        /* Neither we nor userfaultfd know of it: it is not an image's. */
        stuck.tries = 0;
        ret = -EFAULT;
    } else if (stuck.tries > 1) {
        ret = watch_all(cpu);
    }
    /* now, as a watch may take its time */
    stuck.at = get_clock();
    return ret;
}

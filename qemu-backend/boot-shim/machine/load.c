/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Where a kernel and its initrd go in memory, and how it is entered. Not by kexec_file_load(),
 * which keeps a copy of all of it and computes digests of that, twice: much of the time of an
 * emulated processor, and of the memory of a small guest.
 */
#include "machine/kernel.h"

#include <errno.h>
#include <linux/kexec.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include "machine/firmware.h"
#include "machine/stub.h"

#define PAGE ((uint64_t)4096)
#define LOW_MIN ((uint64_t)1 << 20)
#define SEGMENTS_MAX 16
#define LIST_SIZE ((uint64_t)2 << 20) /* what else the kernel takes to keep them */
#define LOADER_KEXEC 0xd0
/* Offsets in struct boot_params, the "zero page". */
#define AT_RSDP 0x70
#define AT_EXT_RAMDISK 0xc0
#define AT_EXT_CMDLINE 0xc8
#define AT_E820_COUNT 0x1e8
#define AT_SENTINEL 0x1ef
#define AT_HEADER 0x1f1
#define AT_HEADER_LENGTH 0x201
#define AT_LOADER 0x210
#define AT_RAMDISK 0x218
#define AT_CMDLINE 0x228
#define AT_E820 0x2d0
#define E820_SIZE 20
#define E820_MAX 128
#define E820_RAM 1
#define ENTRY_64 0x200
/* One after the other, the stub first. */
#define PARAMS_PAGES 1
#define OPTIONS_PAGES 2

struct plan {
    unsigned char params[PARAMS_SIZE]; /* of this kernel, to be that of the next */
    unsigned char stub[STUB_SIZE];
    struct kexec_segment segments[SEGMENTS_MAX];
    size_t count;
};

static uint64_t get64(const unsigned char *at)
{
    uint64_t value = 0;

    for (unsigned i = 8; i-- > 0;)
        value = value << 8 | at[i];
    return value;
}

static uint64_t round_up(uint64_t value, uint64_t to)
{
    return (value + to - 1) / to * to;
}

static void add(struct plan *plan, const void *data, size_t size, uint64_t address)
{
    plan->segments[plan->count++] = (struct kexec_segment){.buf = data,
                                                           .bufsz = size,
                                                           .mem = (const void *)(uintptr_t)address,
                                                           .memsz = round_up(size, PAGE)};
}

/*
 * RAM for size bytes that begins at the earliest at low and ends at the latest at high, as high as
 * there is; 0 if there is none.
 */
static uint64_t find_room(const struct plan *plan, uint64_t size, uint64_t low, uint64_t high)
{
    unsigned count = plan->params[AT_E820_COUNT];
    uint64_t best = 0;

    for (unsigned i = 0; i < count && i < E820_MAX; i++) {
        const unsigned char *entry = plan->params + AT_E820 + i * E820_SIZE;
        uint64_t start = get64(entry), end = start + get64(entry + 8);

        if (entry[16] != E820_RAM || end < start)
            continue;
        start = round_up(start < low ? low : start, PAGE);
        end = (end > high ? high : end) / PAGE * PAGE;
        if (end > start && end - start >= size && end - size > best)
            best = end - size;
    }
    return best;
}

/*
 * Where the kernel wants to be; else anywhere, as it can move itself. Where it wants to be is the
 * shim's kernel. That is well: to copy over code at once is the cheapest way to have an emulator
 * forget what it has translated of it. Page by page, the guest's kernel would pay for that.
 */
static uint64_t place_kernel(const struct plan *plan, const struct kernel *kernel)
{
    uint64_t room = round_up(kernel->room, PAGE), aligned = (uint64_t)2 << 20, address;

    address = find_room(plan, room, kernel->address, kernel->address + room);
    if (!address)
        address = find_room(plan, room + aligned, (uint64_t)16 << 20, (uint64_t)1 << 32);
    return round_up(address, aligned);
}

static int no_memory(struct failure *failure)
{
    return fail_with(failure, -ENOMEM,
                     "there is too little memory for the kernel and its initrd: "
                     "give the guest more");
}

/* The zero page: the machine as firmware has told it, the kernel's own header, and what is new. */
static void fill_params(struct plan *plan, const struct kernel *kernel, uint64_t options,
                        uint64_t initrd, uint64_t initrd_size)
{
    const unsigned char *file = kernel->file.data;
    unsigned char *params = plan->params;
    size_t end = 0x202u + file[AT_HEADER_LENGTH];

    memset(params + AT_HEADER, 0, AT_E820 - AT_HEADER);
    memcpy(params + AT_HEADER, file + AT_HEADER, (end < AT_E820 ? end : AT_E820) - AT_HEADER);
    params[AT_SENTINEL] = 0;
    params[AT_LOADER] = LOADER_KEXEC;
    put32(params + AT_CMDLINE, options);
    put32(params + AT_RAMDISK, initrd_size ? initrd : 0);
    put32(params + AT_RAMDISK + 4, initrd_size);
    put64(params + AT_EXT_RAMDISK, 0);
    put32(params + AT_EXT_CMDLINE, 0);
}

/* What may be taken before the kernel ends programs, of which there is one. */
static uint64_t available_memory(void)
{
    FILE *file = fopen("/proc/meminfo", "re");
    unsigned long long kib = UINT64_MAX >> 10;
    char line[128];

    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1)
            break;
    if (file)
        fclose(file);
    return (uint64_t)kib << 10;
}

/* The kernel copies all of it, and takes half of the memory for that at most. */
static bool memory_suffices(const struct plan *plan)
{
    uint64_t size = LIST_SIZE;
    struct sysinfo info;

    for (size_t i = 0; i < plan->count; i++)
        size += plan->segments[i].memsz;
    return size <= available_memory()
           && (sysinfo(&info) || size <= (uint64_t)info.totalram * info.mem_unit / 2);
}

static int load(struct plan *plan, const struct kernel *kernel, const struct piece *initrd,
                size_t count, const char *options, struct failure *failure)
{
    uint64_t size = 0, low, address, at, at_params, at_options, high = kernel->initrd_max + 1;
    int result = firmware_params(plan->params, failure);

    if (result)
        return result;
    if (strlen(options) > kernel->options_max || strlen(options) >= OPTIONS_PAGES * PAGE)
        return fail_with(failure, -E2BIG,
                         "the command line has %zu characters, and this kernel takes %zu",
                         strlen(options), kernel->options_max);
    for (size_t i = 0; i < count; i++)
        size += round_up(initrd[i].size, PAGE);
    if (count + 4 > SEGMENTS_MAX)
        return fail_with(failure, -E2BIG, "the entry has too many initrds");
    address = place_kernel(plan, kernel);
    low = find_room(plan, STUB_SIZE + (PARAMS_PAGES + OPTIONS_PAGES) * PAGE, LOW_MIN, address);
    at = size ? find_room(plan, size, address + round_up(kernel->room, PAGE), high) : 0;
    /* A kernel at the end of memory has room below it only. */
    if (size && !at && low)
        at = find_room(plan, size, LOW_MIN, low);
    if (!address || !low || (size && !at))
        return no_memory(failure);
    at_params = low + STUB_SIZE;
    at_options = at_params + PARAMS_PAGES * PAGE;
    fill_params(plan, kernel, at_options, at, size);
    stub_make(plan->stub, low, at_params, address + ENTRY_64);
    add(plan, plan->stub, sizeof plan->stub, low);
    add(plan, plan->params, sizeof plan->params, at_params);
    add(plan, options, strlen(options) + 1, at_options);
    add(plan, (const char *)kernel->file.data + kernel->setup_size,
        kernel->file.size - kernel->setup_size, address);
    for (size_t i = 0; i < count; i++) {
        add(plan, initrd[i].data, initrd[i].size, at);
        at += round_up(initrd[i].size, PAGE);
    }
    if (!memory_suffices(plan))
        return no_memory(failure);
    if (syscall(SYS_kexec_load, low, plan->count, plan->segments, KEXEC_ARCH_DEFAULT) == 0)
        return 0;
    if (errno == ENOMEM || errno == EADDRNOTAVAIL)
        return no_memory(failure);
    return fail_with(failure, -errno, "the kernel %s cannot be loaded: %s", kernel->release,
                     strerror(errno));
}

int kernel_load(const struct kernel *kernel, const struct piece *initrd, size_t count,
                const char *options, struct failure *failure)
{
    struct plan *plan = calloc(1, sizeof *plan);
    int result = plan ? load(plan, kernel, initrd, count, options, failure) : no_memory(failure);

    free(plan);
    return result;
}

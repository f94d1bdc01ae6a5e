/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Memory that has lost its content: what the guest is told when it accesses it. An error is what is
 * expected here, in the right place; what is stored is what the model has, so that nothing else
 * changes.
 */
#define _GNU_SOURCE
#include "guest.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/klog.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_LISTED 200
#define LOG_SIZE (1u << 20)
/*
 * Of the AHCI that every machine of this kind has; the first one says what it can do, and stays as
 * it is.
 */
#define REGISTERS "/sys/bus/pci/devices/0000:00:1f.2/resource5"
#define READ_ALL 3                              /* syslog(2) */

static sigjmp_buf way_back;
static volatile sig_atomic_t trying;
static siginfo_t seen;

void errors_caught(int number, const siginfo_t *info)
{
    if (number == SIGBUS && trying) {
        trying = 0;
        seen = *info;
        siglongjmp(way_back, 1);
    }
}

static bool load(const uint8_t *at)
{
    if (sigsetjmp(way_back, 1)) {
        return false;
    }
    trying = 1;
    (void)*(const volatile uint8_t *)at;
    trying = 0;
    return true;
}

static bool store(uint8_t *at, uint8_t value)
{
    if (sigsetjmp(way_back, 1)) {
        return false;
    }
    trying = 1;
    *(volatile uint8_t *)at = value;
    trying = 0;
    return true;
}

/* An instruction that KVM emulates, its load as well. The machine check comes behind it. */
static bool copy_to_device(void *to, const uint8_t *at)
{
    if (sigsetjmp(way_back, 1)) {
        return false;
    }
    trying = 1;
    __asm__ volatile("movsl" : "+D"(to), "+S"(at) : : "memory");
    trying = 0;
    return true;
}

/* The same with the store: KVM has made the load by the time it cannot be made. */
static bool copy_from_device(uint8_t *to, const void *from)
{
    if (sigsetjmp(way_back, 1)) {
        return false;
    }
    trying = 1;
    __asm__ volatile("movsl" : "+D"(to), "+S"(from) : : "memory");
    trying = 0;
    return true;
}

/* 0: the page is as it must be, 1: it cannot be read, -1: it is something else */
static int look_at(const struct memory *memory, size_t page)
{
    int result;

    if (sigsetjmp(way_back, 1)) {
        return 1;
    }
    trying = 1;
    result = memcmp(memory->data + page, memory->model + page, PAGE) ? -1 : 0;
    trying = 0;
    return result;
}

/* Has the kernel taken a machine check for this byte of the device? */
static bool kernel_knows(size_t offset, FILE *out)
{
    char text[32] = "", wanted[64], *log = malloc(LOG_SIZE);
    int fd = open("/sys/bus/dax/devices/dax0.0/resource", O_RDONLY | O_CLOEXEC), length;
    bool found = false;

    if (!log || fd < 0 || read(fd, text, sizeof(text) - 1) <= 0) {
        fprintf(out, "errors: no address of the device: %s", strerror(errno));
    } else {
        snprintf(wanted, sizeof(wanted),
                 "Memory failure: 0x%lx: ", (strtoul(text, NULL, 0) + offset) / PAGE);
        length = klogctl(READ_ALL, log, LOG_SIZE - 1);
        log[length > 0 ? length : 0] = 0;
        found = strstr(log, wanted);
        if (!found) {
            fprintf(out, "errors: SIGBUS, but the kernel's log has no '%s'", wanted);
        }
    }
    if (fd >= 0) {
        close(fd);
    }
    free(log);
    return found;
}

/* An access has failed: was the guest told what it should be told? */
static bool check_told(const struct memory *memory, size_t offset, FILE *out)
{
    size_t told = (size_t)((uint8_t *)seen.si_addr - memory->data),
           unit = (size_t)1 << seen.si_addr_lsb;

    if (seen.si_code != BUS_MCEERR_AR || told / unit != offset / unit) {
        fprintf(out, "errors: access at %#zx, but SIGBUS (si_code %d) of %#zx, %zu bytes",
                DATA_OFFSET + offset, seen.si_code, DATA_OFFSET + told, unit);
        return false;
    }
    if (!kernel_knows(offset, out)) {
        return false;
    }
    fprintf(out, "failed");
    return true;
}

bool errors_load(const struct memory *memory, size_t offset, FILE *out)
{
    return load(memory->data + offset) || check_told(memory, offset, out);
}

bool errors_store(struct memory *memory, size_t offset, FILE *out)
{
    return store(memory->data + offset, memory->model[offset]) || check_told(memory, offset, out);
}

/*
 * Another value than before, which is there afterwards if the store was made, and not if it failed.
 */
bool errors_change(struct memory *memory, size_t offset, FILE *out)
{
    uint8_t value = memory->model[offset] + 1;

    if (!store(memory->data + offset, value)) {
        return check_told(memory, offset, out);
    }
    memory->model[offset] = value;
    return true;
}

/* The registers of the device, or NULL */
static void *map_registers(FILE *out)
{
    int fd = open(REGISTERS, O_RDWR | O_CLOEXEC);
    void *registers = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    if (registers == MAP_FAILED) {
        fprintf(out, "errors: " REGISTERS ": %s", strerror(errno));
        registers = NULL;
    }
    if (fd >= 0) {
        close(fd);
    }
    return registers;
}

bool errors_output(const struct memory *memory, size_t offset, FILE *out)
{
    void *registers = map_registers(out);
    bool ok =
        registers
        && (copy_to_device(registers, memory->data + offset) || check_told(memory, offset, out));

    if (registers) {
        munmap(registers, PAGE);
    }
    return ok;
}

/*
 * As errors_change(). What the first register says of the device is not zero, and stays as it is.
 */
bool errors_input(struct memory *memory, size_t offset, FILE *out)
{
    void *registers = map_registers(out);
    uint32_t content;
    bool ok;

    if (!registers) {
        return false;
    }
    content = *(const volatile uint32_t *)registers;
    if (memcmp(memory->model + offset, &content, sizeof(content)) == 0) {
        fprintf(out, "errors: the memory holds already what " REGISTERS " begins with");
        ok = false;
    } else if (copy_from_device(memory->data + offset, registers)) {
        memcpy(memory->model + offset, &content, sizeof(content));
        ok = true;
    } else {
        ok = check_told(memory, offset, out);
    }
    munmap(registers, PAGE);
    return ok;
}

/* To every other page of the slab; those that fail are counted. */
bool errors_slab(struct memory *memory, size_t offset, FILE *out)
{
    static unsigned failed;
    static size_t page;

    failed = 0;
    for (page = offset / SLAB * SLAB; page < offset / SLAB * SLAB + SLAB; page += 2 * PAGE) {
        failed += !store(memory->data + page, memory->model[page]);
    }
    fprintf(out, "%u of %lu failed", failed, SLAB / PAGE / 2);
    return true;
}

/* One page, by a request to a disk: into it, or out of it. */
bool errors_transfer(struct memory *memory, size_t offset, bool in, FILE *out)
{
    const char *disk = in ? "/dev/vda" : "/dev/vdb";
    int fd = open(disk, (in ? O_RDONLY : O_RDWR) | O_DIRECT | O_CLOEXEC), error;
    ssize_t done;

    if (fd < 0) {
        fprintf(out, "errors: %s: %s", disk, strerror(errno));
        return false;
    }
    done =
        in ? pread(fd, memory->data + offset, PAGE, 0) : pwrite(fd, memory->data + offset, PAGE, 0);
    error = errno;
    close(fd);
    if (done == PAGE) {
        if (in) {
            layout_disk(memory->model + offset, 0, PAGE);
        }
        return true;
    }
    fprintf(out, "%s%s", done < 0 && error == EIO ? "failed" : "errors: ",
            done < 0 && error == EIO ? "" : strerror(error));
    return done < 0 && error == EIO;
}

/*
 * All pages: those that cannot be read are listed, by their offset in the image; the others are
 * what the model says.
 */
bool errors_survey(const struct memory *memory, FILE *out)
{
    static unsigned listed;
    static size_t page;

    listed = 0;
    for (page = 0; page < memory->size; page += PAGE) {
        int result = look_at(memory, page);

        if (result < 0) {
            return compare(memory, page, PAGE, "errors, another page", out);
        }
        if (result > 0 && ++listed > MAX_LISTED) {
            fprintf(out, "errors: more than %d pages cannot be read", MAX_LISTED);
            return false;
        }
        if (result > 0) {
            fprintf(out, "%zu ", DATA_OFFSET + page);
        }
    }
    return true;
}

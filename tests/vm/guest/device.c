/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Stores that an emulator makes: copies from a device's registers straight to the memory, which KVM
 * emulates, store and all; and those of an FPU, which a helper of TCG makes, by a pointer.
 */
#include "guest.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define AT 100                                  /* in the page */

static void copy_string(void *to, const void *from, size_t words)
{
    __asm__ volatile("rep movsl" : "+D"(to), "+S"(from), "+c"(words) : : "memory");
}

/* What the first register of the HPET says of itself stays the same. */
bool device_copy(struct memory *memory, FILE *out)
{
    int fd = open("/dev/hpet", O_RDONLY | O_CLOEXEC);
    const volatile uint32_t *registers = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, 0);
    uint32_t content;
    bool ok = true;

    if (registers == MAP_FAILED || (content = *registers) == 0) {
        fprintf(out, "/dev/hpet cannot be mapped\n");
        return false;
    }
    for (size_t page = 0; ok && page < memory->size; page += PAGE) {
        copy_string(memory->data + page + AT, (const void *)registers, 1);
        memcpy(memory->model + page + AT, &content, sizeof(content));
        ok = compare(memory, page, PAGE, "rep movsl", out);
    }
    munmap((void *)registers, PAGE);
    close(fd);
    return ok;
}

static void store_pi(void *to)
{
    __asm__ volatile("fninit; fldpi; fstpt (%0)" : : "r"(to) : "memory");
}

bool fpu_store(struct memory *memory, FILE *out)
{
    bool ok = true;

    for (size_t page = 0; ok && page < memory->size; page += PAGE) {
        store_pi(memory->data + page + AT);
        store_pi(memory->model + page + AT);
        ok = compare(memory, page, PAGE, "fstpt", out);
    }
    return ok;
}

/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef PCOW_VM_STORES_H
#define PCOW_VM_STORES_H

#include <stddef.h>
#include <stdint.h>

#define BUFFER_SIZE (4 * 4096)

/* What a store is done with; the same for the image and for the model. */
struct operands {
    uint64_t a, b, c;                           /* random */
    /* of string instructions and system calls, bytes; a multiple of 8 */
    size_t length;
    uint8_t *buffer;                            /* random content, in ordinary memory */
    int file;                                   /* the same content in a file */
};

struct store_kind {
    const char *name;
    void (*run)(uint8_t *to, const uint8_t *from, const struct operands *operands);
    size_t span;                                /* bytes that it may touch; 0: operands.length */
    size_t align;                               /* that it needs */
    int (*available)(void);                     /* NULL: on every x86-64 */
};

extern const struct store_kind scalar_kinds[], vector_kinds[], string_kinds[];
extern const size_t scalar_kinds_count, vector_kinds_count, string_kinds_count;

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/*
 * One kind whose instructions take TO in a register and operands a, b, c in others; they clobber
 * what they list.
 */
#define STORE(NAME, CODE, ...) \
    static void NAME(uint8_t *to, const uint8_t *from, const struct operands *o) \
    { \
        (void)from; \
        __asm__ volatile("xor %%ecx, %%ecx\n\t" CODE \
                         : \
                         : [to] "D"(to), [from] "S"(from), [a] "r"(o->a), [b] "r"(o->b) \
                         : "memory", "cc", "rcx", ##__VA_ARGS__); \
    }

#endif

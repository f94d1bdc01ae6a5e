/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Stores of unknown length: string instructions, forwards and backwards, from memory of both kinds,
 * and the guest's kernel.
 */
#include "stores.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

/* OPERATION with rdi = TO, rsi = SOURCE, rcx = LENGTH, rax = a. */
#define STRING(NAME, SOURCE, LENGTH, OPERATION) \
    static void NAME(uint8_t *to, const uint8_t *from, const struct operands *o) \
    { \
        const uint8_t *source = SOURCE; \
        size_t count = LENGTH; \
        (void)from; \
        __asm__ volatile(OPERATION : "+D"(to), "+S"(source), "+c"(count) : "a"(o->a) : "memory", "cc"); \
    }
/* From the last unit of WIDTH bytes down to the first. */
#define STRING_DOWN(NAME, SOURCE, WIDTH, OPERATION) \
    static void NAME(uint8_t *to, const uint8_t *from, const struct operands *o) \
    { \
        const uint8_t *source = SOURCE + o->length - (WIDTH); \
        size_t count = o->length / (WIDTH); \
        (void)from; \
        to += o->length - (WIDTH); \
        __asm__ volatile("std; " OPERATION "; cld" : "+D"(to), "+S"(source), "+c"(count) : "a"(o->a) : "memory", "cc"); \
    }

STRING(rep_stosb, o->buffer, o->length, "rep stosb")
STRING(rep_stosw, o->buffer, o->length / 2, "rep stosw")
STRING(rep_stosl, o->buffer, o->length / 4, "rep stosl")
STRING(rep_stosq, o->buffer, o->length / 8, "rep stosq")
STRING(rep_movsb, o->buffer, o->length, "rep movsb")
STRING(rep_movsw, o->buffer, o->length / 2, "rep movsw")
STRING(rep_movsl, o->buffer, o->length / 4, "rep movsl")
STRING(rep_movsq, o->buffer, o->length / 8, "rep movsq")
STRING(rep_movsb_inside, from, o->length, "rep movsb")
STRING(rep_movsq_inside, from, o->length / 8, "rep movsq")
STRING(stos_without_rep, o->buffer, 1, "stosq; stosb; stosl")
STRING(movs_without_rep, from, 1, "movsq; movsb; movsl")
STRING_DOWN(rep_stosb_down, o->buffer, 1, "rep stosb")
STRING_DOWN(rep_stosq_down, o->buffer, 8, "rep stosq")
STRING_DOWN(rep_movsb_down, o->buffer, 1, "rep movsb")
STRING_DOWN(rep_movsq_down_inside, from, 8, "rep movsq")

static void must(ssize_t result, size_t length, const char *call)
{
    if (result != (ssize_t)length) {
        perror(call);
        abort();
    }
}

static void read_file(uint8_t *to, const uint8_t *from, const struct operands *o)
{
    (void)from;
    must(pread(o->file, to, o->length, (off_t)(o->a % 512)), o->length, "pread into the memory");
}

static void read_vector(uint8_t *to, const uint8_t *from, const struct operands *o)
{
    size_t half = o->length / 2;
    struct iovec vectors[2] = { { to + half, o->length - half }, { to, half } };

    (void)from;
    must(preadv(o->file, vectors, 2, (off_t)(o->a % 512)), o->length, "preadv into the memory");
}

/* Out of the memory and back into it, through a pipe. */
static void through_pipe(uint8_t *to, const uint8_t *from, const struct operands *o)
{
    int ends[2];

    must(pipe(ends), 0, "pipe");
    must(write(ends[1], from, o->length), o->length, "write to a pipe from the memory");
    must(read(ends[0], to, o->length), o->length, "read from a pipe into the memory");
    close(ends[0]);
    close(ends[1]);
}

#define KIND(NAME, SPAN) { #NAME, NAME, SPAN, 1, NULL }

const struct store_kind string_kinds[] = {
    KIND(rep_stosb, 0), KIND(rep_stosw, 0), KIND(rep_stosl, 0), KIND(rep_stosq, 0), KIND(rep_movsb, 0), KIND(rep_movsw, 0),
    KIND(rep_movsl, 0), KIND(rep_movsq, 0), KIND(rep_movsb_inside, 0), KIND(rep_movsq_inside, 0), KIND(stos_without_rep, 13),
    KIND(movs_without_rep, 13), KIND(rep_stosb_down, 0), KIND(rep_stosq_down, 0), KIND(rep_movsb_down, 0), KIND(rep_movsq_down_inside, 0),
    KIND(read_file, 0), KIND(read_vector, 0), KIND(through_pipe, 0),
};
const size_t string_kinds_count = COUNT(string_kinds);

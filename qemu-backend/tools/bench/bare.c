/* SPDX-License-Identifier: BSD-3-Clause */
#include "bare.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "report.h"

static struct {
    uint8_t *memory;
    const struct trap_row *row;
    const struct copies *copies;
    /* the stores before those that are timed: a page each */
    bool warming;
} bare;

/* The range that a trap at this offset brings in. */
static void choose(uint64_t offset, uint64_t *from, uint64_t *length)
{
    uint64_t cluster = offset / bare.row->cluster_size * bare.row->cluster_size;

    *from = cluster;
    *length = bare.row->cluster_size;
    if (bare.warming || bare.row->copied == PCOW_PAGE_SIZE) {
        *from = offset / PCOW_PAGE_SIZE * PCOW_PAGE_SIZE;
        *length = PCOW_PAGE_SIZE;
    } else if (bare.row->copied) {             /* the first page of the cluster is there */
        *from += PCOW_PAGE_SIZE;
        *length -= PCOW_PAGE_SIZE;
    }
}

static void handle(int number, siginfo_t *info, void *context)
{
    const struct raw *source = &bare.copies->source, *target = &bare.copies->target;
    uint64_t from, length;

    (void)number;
    (void)context;
    choose((uint64_t)((uint8_t *)info->si_addr - bare.memory), &from, &length);
    if (bare.row->copied
        && pread(source->fd, target->memory + from, length, (off_t)from) != (ssize_t)length) {
        _exit(1);
    }
    if (mmap(bare.memory + from, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, target->fd,
             (off_t)from)
        == MAP_FAILED) {
        _exit(1);
    }
}

int bare_run(struct stores *stores, const struct bench *bench, const struct trap_row *row,
             struct copies *copies, struct pcow_error *error)
{
    struct sigaction action = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_NODEFER},
                     previous;
    int flags =
            MAP_FIXED | (row->copied ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE),
        r;
    void *reservation = NULL;

    bare.memory = reserve_aligned(bench->size, &reservation);
    bare.row = row;
    bare.copies = copies;
    if (!bare.memory
        || mmap(bare.memory, bench->size, PROT_READ, flags, row->copied ? copies->source.fd : -1, 0)
               == MAP_FAILED) {
        release_aligned(reservation, bench->size);
        return fail(error, -ENOMEM, "cannot map %llu bytes: %s", (unsigned long long)bench->size,
                    strerror(errno));
    }
    sigemptyset(&action.sa_mask);
    sigaction(SIGSEGV, &action, &previous);
    bare.warming = true;
    stores_warm(stores, bare.memory);
    bare.warming = false;
    r = stores_run(stores, bare.memory, error);
    sigaction(SIGSEGV, &previous, NULL);
    /* What was not copied is what an earlier repetition has left in the target. */
    if (!r && row->copied) {
        r = stores_verify(stores, "a bare trap", bare.memory, true, false, error);
    }
    release_aligned(reservation, bench->size);
    return r;
}

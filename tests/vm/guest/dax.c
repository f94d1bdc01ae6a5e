/* SPDX-License-Identifier: BSD-3-Clause */
/* The same disk I/O to and from a file on a DAX file system, for guests that have one. */
#define _GNU_SOURCE
#include "guest.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define TRANSFERS 60u                           /* of each thread */

bool dax_transfers(unsigned threads, const char *path, FILE *out)
{
    struct memory memory = { .threads = threads };
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat st;
    bool ok;

    if (threads == 0 || threads > MAX_THREADS || fd < 0 || fstat(fd, &st) < 0) {
        perror(path);
        return false;
    }
    memory.size = memory.transfers.length = (size_t)st.st_size;
    /* with MAP_SYNC the kernel says whether this is the memory itself */
    memory.data =
        mmap(NULL, memory.size, PROT_READ | PROT_WRITE, MAP_SHARED_VALIDATE | MAP_SYNC, fd, 0);
    memory.model = malloc(memory.size);
    if (memory.data == MAP_FAILED || !memory.model
        || pread(fd, memory.model, memory.size, 0) != (ssize_t)memory.size) {
        perror(path);
        return false;
    }
    ok = transfers_run(&memory, memory.size, TRANSFERS, out)
         && msync(memory.data, memory.size, MS_SYNC) == 0;
    munmap(memory.data, memory.size);
    free(memory.model);
    close(fd);
    return ok;
}

/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * store-pages FILE [TIMES]: maps a file on a DAX file system and stores to every page until that
 * has failed so often (once). Prints "failed at OFFSET" after the first SIGBUS, or "stored all";
 * then loads from the first page.
 */
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>

static sigjmp_buf after_error;

static void handle(int number)
{
    (void)number;
    siglongjmp(after_error, 1);
}

int main(int argc, char **argv)
{
    struct sigaction action = {.sa_handler = handle};
    int fd = argc >= 2 ? open(argv[1], O_RDWR) : -1;
    volatile long offset = 0, failed = 0, times = argc > 2 ? atol(argv[2]) : 1;
    struct stat st;
    volatile unsigned char *memory;

    if (fd < 0 || fstat(fd, &st)) {
        perror("store-pages");
        return 1;
    }
    memory = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
        perror("mmap");
        return 1;
    }
    sigaction(SIGBUS, &action, NULL);
    if (sigsetjmp(after_error, 1)) {
        if (failed == 0)
            printf("failed at %ld\n", offset);
        failed++;
        offset += 4096;
    }
    for (; offset < st.st_size && failed < times; offset += 4096)
        memory[offset] = 0x77;
    puts(failed ? "stopped" : "stored all");
    printf("first page: %#x\n", memory[0]);
    return 0;
}

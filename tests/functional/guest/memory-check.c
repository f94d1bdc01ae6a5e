/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs in the guest of the snapshot tests: keeps the same pages in RAM and, mapped with DAX, on
 * persistent memory, changes them all the time, and looks at every byte of both all the time.
 *
 * A round stores generation n of a few pages to persistent memory, then the same to RAM; between
 * the two the pages are ahead by one generation, so a VM that is stopped anywhere and goes on from
 * there finds both alike when the round is done. A VM whose memory went back without its RAM, or
 * the other way round, does not, and neither does one that was started anew: it would count its
 * rounds from the beginning.
 *
 * Says on the console, several times a second:   check: gen=N mark=WORD ok      or once:   check: BROKEN ...
 * Takes lines from the console:   mark WORD   stores a word in both memories,   pages N   how many pages a round changes.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 1024, WORDS = PAGE / 8, MARK = 32 };

struct memory {
    uint64_t generation[PAGES];                /* of each page */
    char mark[MARK];
    uint64_t page[PAGES][WORDS];
};

static uint64_t mix(uint64_t x)
{
    x ^= x >> 33;
    x *= UINT64_C(0xff51afd7ed558ccd);
    x ^= x >> 33;
    return x;
}

static void fill(struct memory *memory, unsigned page, uint64_t generation)
{
    uint64_t value = mix(generation * PAGES + page);

    for (unsigned i = 0; i < WORDS; i++)
        memory->page[page][i] = value + i;
    memory->generation[page] = generation;
}

static void broken(const char *what, unsigned page, uint64_t ram, uint64_t pmem)
{
    printf("check: BROKEN %s page %u: RAM %llx, persistent memory %llx\n", what, page,
           (unsigned long long)ram, (unsigned long long)pmem);
    for (;;)
        pause();
}

static void compare(const struct memory *ram, const struct memory *pmem)
{
    if (memcmp(ram->mark, pmem->mark, MARK))
        broken("mark", 0, (unsigned char)ram->mark[0], (unsigned char)pmem->mark[0]);
    for (unsigned page = 0; page < PAGES; page++) {
        uint64_t value = mix(ram->generation[page] * PAGES + page);

        if (ram->generation[page] != pmem->generation[page])
            broken("generation of", page, ram->generation[page], pmem->generation[page]);
        for (unsigned i = 0; i < WORDS; i++)
            if (ram->page[page][i] != value + i || pmem->page[page][i] != value + i)
                broken("contents of", page, ram->page[page][i], pmem->page[page][i]);
    }
}

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int is_virtio(void)
{
    char *device = realpath("/sys/block/pmem0", NULL);
    int is = device && strstr(device, "/virtio");

    free(device);
    return is;
}

static struct memory *map(const char *path)
{
    struct memory *memory;
    int fd = open(path, O_RDWR | O_CREAT, 0600), error;

    if (fd < 0 || (error = posix_fallocate(fd, 0, sizeof *memory)) != 0)
        return NULL;
    /* MAP_SYNC is refused unless stores go to persistent memory itself */
    memory =
        mmap(NULL, sizeof *memory, PROT_READ | PROT_WRITE, MAP_SHARED_VALIDATE | MAP_SYNC, fd, 0);
    /* by a virtio-pmem too, as it wants a flush; init has seen that the mount has DAX */
    if (memory == MAP_FAILED && errno == EOPNOTSUPP && is_virtio())
        memory = mmap(NULL, sizeof *memory, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static void obey(char *line, struct memory *ram, struct memory *pmem, unsigned *pages)
{
    char mark[MARK] = "";

    line[strcspn(line, "\r\n")] = 0;
    if (sscanf(line, "mark %31s", mark) == 1) {
        memcpy(pmem->mark, mark, MARK);
        memcpy(ram->mark, mark, MARK);
    } else if (sscanf(line, "pages %u", pages) != 1 || *pages > PAGES) {
        *pages = 1;
    }
}

int main(int argc, char **argv)
{
    struct memory *ram = calloc(1, sizeof *ram), *pmem = argc == 2 ? map(argv[1]) : NULL;
    char line[128];
    uint64_t generation = 0;
    unsigned next = 0, pages = 8;
    size_t length = 0;
    double told = 0;

    setvbuf(stdout, NULL, _IOLBF, 0);
    if (!ram || !pmem) {
        printf("check: BROKEN cannot map %s: %s\n", argc == 2 ? argv[1] : "?", strerror(errno));
        return 1;
    }
    memcpy(ram->mark, "none", 5);
    memcpy(pmem->mark, ram->mark, MARK);
    for (unsigned page = 0; page < PAGES; page++) {
        fill(pmem, page, 0);
        fill(ram, page, 0);
    }
    fcntl(0, F_SETFL, O_NONBLOCK);
    for (;;) {
        ssize_t got = read(0, line + length, sizeof line - 1 - length);

        generation++;
        for (unsigned i = 0; i < pages; i++, next = (next + 37) % PAGES) {
            fill(pmem, next, generation);
            fill(ram, next, generation);
        }
        if (got > 0) {
            length += (size_t)got;
            line[length] = 0;
            if (strpbrk(line, "\r\n") || length == sizeof line - 1) {
                obey(line, ram, pmem, &pages);
                length = 0;
            }
        }
        if (now() - told >= 0.1) {
            compare(ram, pmem);
            told = now();
            printf("check: gen=%llu mark=%s ok\n", (unsigned long long)generation, ram->mark);
        }
    }
}

/* SPDX-License-Identifier: BSD-3-Clause */
#include "guest.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* A raw file with the state of an image at some moment of the load. */
static bool check_load(unsigned threads, const char *path)
{
    struct memory memory = { .threads = threads };
    struct stat st;
    uint8_t *image;
    int fd = open(path, O_RDONLY | O_CLOEXEC);

    if (threads == 0 || threads > MAX_THREADS || fd < 0 || fstat(fd, &st) < 0
        || (size_t)st.st_size <= DATA_OFFSET) {
        perror(path);
        return false;
    }
    layout_zones(&memory, (size_t)st.st_size - DATA_OFFSET);
    image = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    memory.model = malloc(memory.size);
    if (image == MAP_FAILED || !memory.model) {
        perror(path);
        return false;
    }
    close(fd);
    memory.data = image + DATA_OFFSET;
    layout_fill(memory.model, 0, memory.size, LEVEL_ACTIVE);
    return load_check(&memory, false, stdout);
}

int main(int argc, char **argv)
{
    if (getpid() == 1) {
        return init_main();
    }
    if (argc == 5 && strcmp(argv[1], "raw") == 0) {             /* LEVEL IMAGE-SIZE FILE */
        return layout_write_raw((enum level)atoi(argv[2]), strtoul(argv[3], NULL, 0), argv[4]) < 0;
    }
    if (argc == 4 && strcmp(argv[1], "disk") == 0) {            /* SIZE FILE */
        return layout_write_disk(strtoul(argv[2], NULL, 0), argv[3]) < 0;
    }
    if (argc == 4 && strcmp(argv[1], "load-check") == 0) {      /* THREADS FILE */
        return !check_load((unsigned)atoi(argv[2]), argv[3]);
    }
    if (argc == 3 && strcmp(argv[1], "script") == 0) {          /* IMAGE-SIZE */
        return layout_print_script(strtoul(argv[2], NULL, 0)) < 0;
    }
    if (argc == 4 && strcmp(argv[1], "transfers") == 0) {       /* THREADS FILE */
        return !dax_transfers((unsigned)atoi(argv[2]), argv[3], stdout);
    }
    fprintf(stderr,
            "usage: %s raw LEVEL IMAGE-SIZE FILE | disk SIZE FILE | load-check THREADS FILE | "
            "script IMAGE-SIZE | transfers THREADS FILE\n",
            argv[0]);
    return 2;
}

/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Runs files, and the files of directories, through the fuzz target: the corpus as a regression
 * test, without libFuzzer.
 */
#include <dirent.h>
#include <ftw.h>
#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static unsigned runs;

static int run_file(const char *path)
{
    static uint8_t data[1 << 20];
    FILE *file = fopen(path, "rb");
    size_t size;

    if (!file) {
        perror(path);
        return 1;
    }
    size = fread(data, 1, sizeof data, file);
    fclose(file);
    /* Named before it runs: if it crashes, the last line says which one it was. */
    printf("%s\n", path);
    fflush(stdout);
    LLVMFuzzerTestOneInput(data, size);
    runs++;
    return 0;
}

static int run_directory(const char *path)
{
    DIR *dir = opendir(path);
    struct dirent *entry;
    int failed = 0;

    if (!dir) {
        perror(path);
        return 1;
    }
    while ((entry = readdir(dir))) {
        char file[4096];

        if (entry->d_name[0] == '.')
            continue;
        snprintf(file, sizeof file, "%s/%s", path, entry->d_name);
        failed |= run_file(file);
    }
    closedir(dir);
    return failed;
}

static int run_all(int count, char **paths)
{
    int failed = 0;

    for (int i = 0; i < count; i++) {
        struct stat st;

        failed |= stat(paths[i], &st) == 0 && S_ISDIR(st.st_mode) ? run_directory(paths[i])
                                                                  : run_file(paths[i]);
    }
    printf("%u inputs\n", runs);
    return failed || runs == 0;
}

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *where)
{
    (void)st;
    (void)type;
    (void)where;
    return remove(path);
}

/* A child does the work, so that its scratch files go even when it crashes. */
int main(int argc, char **argv)
{
    const char *top = getenv("TMPDIR");
    char directory[256];
    struct stat st;
    int status = 0;
    pid_t child;

    snprintf(directory, sizeof directory, "%s/pcow-replay-XXXXXX",
             top                          ? top
             : stat("/dev/shm", &st) == 0 ? "/dev/shm"
                                          : "/tmp");
    if (!mkdtemp(directory) || setenv("TMPDIR", directory, 1)) {
        perror(directory);
        return 1;
    }
    child = fork();
    if (child == 0)
        exit(run_all(argc - 1, argv + 1));
    if (child < 0 || waitpid(child, &status, 0) != child)
        perror("replay");
    nftw(directory, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
    if (child > 0 && WIFSIGNALED(status))
        fprintf(stderr, "the last input named above ended it with signal %d\n", WTERMSIG(status));
    return child > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

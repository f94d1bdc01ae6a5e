/* SPDX-License-Identifier: BSD-3-Clause */
#include "format/qemu_img.h"

#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "report.h"

static int spawn(char *const arguments[], bool quiet, pid_t *child)
{
    posix_spawn_file_actions_t actions;
    int r = posix_spawn_file_actions_init(&actions);

    if (r) {
        return r;
    }
    r = posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    if (!r && quiet) {
        r = posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    }
    if (!r && quiet) {
        r = posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
    }
    if (!r) {
        r = posix_spawnp(child, arguments[0], &actions, NULL, arguments, environ);
    }
    posix_spawn_file_actions_destroy(&actions);
    return r;
}

int qemu_img_run(char *const arguments[], bool quiet, int *status, struct pcow_error *error)
{
    pid_t child;
    int r = spawn(arguments, quiet, &child), ended;

    if (r) {
        return fail(
            error, -r,
            "cannot run qemu-img (package qemu-utils), which is needed for qcow2 images: %s",
            strerror(r));
    }
    while (waitpid(child, &ended, 0) < 0) {
        if (errno != EINTR) {
            return fail(error, -errno, "cannot wait for qemu-img: %s", strerror(errno));
        }
    }
    *status = WIFEXITED(ended) ? WEXITSTATUS(ended) : -1;
    return 0;
}

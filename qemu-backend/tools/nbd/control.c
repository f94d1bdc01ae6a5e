/* SPDX-License-Identifier: BSD-3-Clause */
#include "control.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define MAX_CLIENTS 8
#define MAX_LINE 512
#define MAX_WORDS 3

struct client {
    int fd;                                     /* -1: none */
    bool paused;
    size_t used;
    char line[MAX_LINE];
};

struct control {
    pcow_image *image;
    char name[NAME_MAX + 1];                    /* of the socket */
    ino_t number;                               /* of its file; 0: there is none */
    int directory, listener, wake[2];
    pthread_t thread;
    bool started;
    struct client clients[MAX_CLIENTS];         /* of the thread alone */
    /*
     * libpcow wants one call at a time for an image: held for each request of a client, and for
     * each command.
     */
    pthread_mutex_t lock;
    pthread_cond_t resumed;
    unsigned paused;                            /* clients of ours that have; under lock */
};

static int fail(struct pcow_error *error, const char *path, const char *what, int code)
{
    error->code = -code;
    snprintf(error->message, sizeof error->message, "%s: no control socket beside it: %s%s%s", path,
             what, code ? ": " : "", code ? strerror(code) : "");
    return -code;
}

/* A path of any length fits into an address by way of the directory's descriptor. */
static bool make_address(const struct control *control, struct sockaddr_un *address)
{
    int length;

    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    length = snprintf(address->sun_path, sizeof address->sun_path, "/proc/self/fd/%d/%s",
                      control->directory, control->name);
    return length > 0 && (size_t)length < sizeof address->sun_path;
}

/*
 * Whoever may write to the image may write to the socket: its group, as far as this user may give
 * that, and its mode. Both are settled before there is a name: by then whoever has the directory
 * may have put something else under it.
 */
static int bind_as(const struct control *control, const struct stat *image,
                   const struct stat *directory, const struct sockaddr_un *address)
{
    mode_t mode = image->st_mode & (S_IRUSR | S_IWUSR | S_IRGRP | S_IWGRP | S_IROTH | S_IWOTH),
           mask;
    gid_t group;
    int ret;

    setfsgid(image->st_gid);
    group = directory->st_mode & S_ISGID ? directory->st_gid : (gid_t)setfsgid((gid_t)-1);
    if (group != image->st_gid)
        mode &= ~(mode_t)(S_IRWXG | S_IRWXO);
    mask = umask((S_IRWXU | S_IRWXG | S_IRWXO) & ~mode);
    ret = bind(control->listener, (const struct sockaddr *)address, sizeof *address) ? -errno : 0;
    umask(mask);
    setfsgid(getegid());
    return ret;
}

/* A socket, and only that, is taken away; number: of this one (0: of any). */
static int unlink_socket(const struct control *control, ino_t number)
{
    struct stat status;

    if (fstatat(control->directory, control->name, &status, AT_SYMLINK_NOFOLLOW))
        return errno == ENOENT ? 0 : -errno;
    if (!S_ISSOCK(status.st_mode))
        return number ? 0 : -EEXIST;
    if (number && status.st_ino != number)
        return 0;
    return unlinkat(control->directory, control->name, 0) && errno != ENOENT ? -errno : 0;
}

static int listen_beside(struct control *control, const char *path, struct pcow_error *error)
{
    char *first = strdup(path), *second = strdup(path);
    struct stat image, named, directory;
    struct sockaddr_un address;
    const char *base = "";
    int ret = 0, length = 0;

    if (first && second) {
        base = basename(first);
        length = snprintf(control->name, sizeof control->name, ".%s.control", base);
        control->directory = open(dirname(second), O_PATH | O_DIRECTORY | O_CLOEXEC);
    }
    if (control->directory < 0)
        ret = fail(error, path, "its directory", first && second ? errno : ENOMEM);
    else if ((size_t)length >= sizeof control->name || !make_address(control, &address))
        ret = fail(error, path, "its name", ENAMETOOLONG);
    else if (fstat(pcow_fd(control->image), &image))
        ret = fail(error, path, "the image", errno);
    else if (fstat(control->directory, &directory) || fstatat(control->directory, base, &named, 0))
        ret = fail(error, path, "its directory", errno);
    else if (image.st_dev != named.st_dev || image.st_ino != named.st_ino)
        ret = fail(error, path, "another file is there by now", 0);
    free(first);
    free(second);
    if (ret)
        return ret;
    control->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (control->listener < 0)
        return fail(error, path, "socket", errno);
    /* The image is locked by us, so no other server lives that listens there. */
    if ((ret = unlink_socket(control, 0)))
        return fail(error, path, "the old one cannot be removed", -ret);
    if ((ret = bind_as(control, &image, &directory, &address)))
        return fail(error, path, "socket", -ret);
    if (fstatat(control->directory, control->name, &named, AT_SYMLINK_NOFOLLOW) == 0
        && S_ISSOCK(named.st_mode))
        control->number = named.st_ino;
    return listen(control->listener, MAX_CLIENTS) ? fail(error, path, "socket", errno) : 0;
}

int control_listen(struct control **result, const char *path, pcow_image *image,
                   struct pcow_error *error)
{
    struct control *control = calloc(1, sizeof *control);
    int ret;

    *result = NULL;
    if (!control)
        return fail(error, path, "memory", ENOMEM);
    control->directory = control->listener = control->wake[0] = control->wake[1] = -1;
    for (int i = 0; i < MAX_CLIENTS; i++)
        control->clients[i].fd = -1;
    pthread_mutex_init(&control->lock, NULL);
    pthread_cond_init(&control->resumed, NULL);
    control->image = image;
    ret = listen_beside(control, path, error);
    if (ret) {
        control_end(control);
        return ret;
    }
    *result = control;
    return 0;
}

void control_enter(struct control *control)
{
    if (!control)
        return;
    pthread_mutex_lock(&control->lock);
    while (control->paused > 0)
        pthread_cond_wait(&control->resumed, &control->lock);
}

void control_leave(struct control *control)
{
    if (control)
        pthread_mutex_unlock(&control->lock);
}

static void set_paused(struct control *control, struct client *client, bool paused)
{
    if (client->paused == paused)
        return;
    client->paused = paused;
    control->paused += paused ? 1 : -1;
    if (control->paused == 0)
        pthread_cond_broadcast(&control->resumed);
}

/*
 * Under the lock. What clients have had answered is in a snapshot; what they have flushed is
 * durable in it.
 */
static int obey(struct control *control, struct client *client, char **words, int count,
                struct pcow_error *error)
{
    if (count == 1 && !strcmp(words[0], "pause"))
        return set_paused(control, client, true), 0;
    if (count == 1 && !strcmp(words[0], "resume"))
        return set_paused(control, client, false), 0;
    if (count == 2 && !strcmp(words[0], "snapshot-create"))
        return pcow_snapshot_create(control->image, words[1], error);
    if (count == 2 && !strcmp(words[0], "snapshot-delete"))
        return pcow_snapshot_delete(control->image, words[1], NULL, error);
    if (count == 3 && !strcmp(words[0], "snapshot-rename"))
        return pcow_snapshot_rename(control->image, words[1], words[2], error);
    snprintf(error->message, sizeof error->message, "there is no such command: %s", words[0]);
    return -EINVAL;
}

static void answer(struct control *control, struct client *client, char *line)
{
    char *words[MAX_WORDS + 1], *rest = line, text[sizeof((struct pcow_error *)0)->message + 16];
    struct pcow_error error = {0};
    int count = 0, ret = -EINVAL;
    ssize_t sent;

    while (count < MAX_WORDS + 1 && (words[count] = strsep(&rest, "\t")))
        count++;
    snprintf(error.message, sizeof error.message, "a command of too many words");
    if (count <= MAX_WORDS) {
        pthread_mutex_lock(&control->lock);
        ret = obey(control, client, words, count, &error);
        pthread_mutex_unlock(&control->lock);
    }
    if (ret)
        snprintf(text, sizeof text, "error\t%s\n", error.message);
    else
        snprintf(text, sizeof text, "ok\n");
    /* It is one short line in an empty buffer; who does not read it loses it. */
    sent = send(client->fd, text, strlen(text), MSG_NOSIGNAL | MSG_DONTWAIT);
    (void)sent;
}

static void hang_up(struct control *control, struct client *client)
{
    close(client->fd);
    client->fd = -1;
    client->used = 0;
    pthread_mutex_lock(&control->lock);
    set_paused(control, client, false);
    pthread_mutex_unlock(&control->lock);
}

static void hear(struct control *control, struct client *client)
{
    ssize_t got = recv(client->fd, client->line + client->used, sizeof client->line - client->used,
                       MSG_DONTWAIT);
    char *end;

    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (got > 0)
        client->used += (size_t)got;
    while (got > 0 && (end = memchr(client->line, '\n', client->used))) {
        size_t length = (size_t)(end - client->line) + 1;

        *end = 0;
        /* A zero byte would hide words behind it. */
        if (strlen(client->line) + 1 != length)
            got = 0;
        else
            answer(control, client, client->line);
        client->used -= length;
        memmove(client->line, client->line + length, client->used);
    }
    if (got <= 0 || client->used == sizeof client->line)
        hang_up(control, client);
}

static void welcome(struct control *control)
{
    int fd = accept4(control->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    for (int i = 0; fd >= 0 && i < MAX_CLIENTS; i++)
        if (control->clients[i].fd < 0) {
            control->clients[i].fd = fd;
            return;
        }
    if (fd >= 0)
        /* too many at once: the end of the connection tells them */
        close(fd);
}

static void *serve(void *opaque)
{
    struct control *control = opaque;
    struct pollfd polled[MAX_CLIENTS + 2];

    for (;;) {
        polled[0] = (struct pollfd){.fd = control->wake[0], .events = POLLIN};
        polled[1] = (struct pollfd){.fd = control->listener, .events = POLLIN};
        for (int i = 0; i < MAX_CLIENTS; i++)
            polled[2 + i] = (struct pollfd){.fd = control->clients[i].fd, .events = POLLIN};
        if (poll(polled, MAX_CLIENTS + 2, -1) < 0)
            continue;                           /* EINTR */
        if (polled[0].revents)
            return NULL;
        for (int i = 0; i < MAX_CLIENTS; i++)
            if (polled[2 + i].revents)
                hear(control, &control->clients[i]);
        if (polled[1].revents)
            welcome(control);
    }
}

int control_start(struct control *control)
{
    int ret;

    if (pipe2(control->wake, O_CLOEXEC))
        return -errno;
    ret = -pthread_create(&control->thread, NULL, serve, control);
    control->started = ret == 0;
    return ret;
}

void control_end(struct control *control)
{
    if (!control)
        return;
    if (control->wake[1] >= 0)
        close(control->wake[1]);
    if (control->started)
        pthread_join(control->thread, NULL);
    for (int i = 0; i < MAX_CLIENTS; i++)
        if (control->clients[i].fd >= 0)
            hang_up(control, &control->clients[i]);
    if (control->number)                        /* else what is there is not ours */
        unlink_socket(control, control->number);
    for (size_t i = 0; i < 3; i++) {
        int fd = (const int[]){control->directory, control->listener, control->wake[0]}[i];

        if (fd >= 0)
            close(fd);
    }
    pthread_cond_destroy(&control->resumed);
    pthread_mutex_destroy(&control->lock);
    free(control);
}

/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A thread that takes connections from the host, one after the other, and sends back each byte with
 * one added. The buffers are of the guest's kernel, as in net.c.
 */
#include "guest.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <linux/vm_sockets.h>

#define CHUNK 65536ul
/* after which the thread looks whether it has to end */
#define STOP_MILLISECONDS 20

static struct {
    pthread_t thread;
    int listener;
    volatile bool stop;
    bool running;
    unsigned long echoed;
} vsock = { .listener = -1 };

static bool send_all(int connection, const uint8_t *data, size_t length)
{
    while (length && !vsock.stop) {
        ssize_t done = send(connection, data, length, MSG_NOSIGNAL);

        if (done < 0 && errno != EAGAIN) {
            return false;
        }
        if (done > 0) {
            data += done;
            length -= (size_t)done;
            vsock.echoed += (unsigned long)done;
        }
    }
    return true;
}

static void echo(int connection)
{
    static uint8_t data[CHUNK];

    while (!vsock.stop) {
        ssize_t got = recv(connection, data, sizeof(data), 0);

        if (got == 0 || (got < 0 && errno != EAGAIN)) {
            return;
        }
        for (ssize_t i = 0; i < got; i++) {
            data[i]++;
        }
        if (got > 0 && !send_all(connection, data, (size_t)got)) {
            return;
        }
    }
}

static bool set_patience(int fd)
{
    struct timeval wait = { .tv_usec = STOP_MILLISECONDS * 1000 };

    return setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait)) == 0 &&
           setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait)) == 0;
}

static void *vsock_thread(void *opaque)
{
    (void)opaque;
    while (!vsock.stop) {
        int connection = accept(vsock.listener, NULL, NULL);

        if (connection >= 0) {
            if (set_patience(connection)) {
                echo(connection);
            }
            close(connection);
        }
    }
    return NULL;
}

bool vsock_start(unsigned port, FILE *out)
{
    struct sockaddr_vm address = {
        .svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_ANY, .svm_port = port};

    if (vsock.running) {
        fprintf(out, "connections are taken already");
        return false;
    }
    vsock.stop = false;
    vsock.echoed = 0;
    vsock.listener = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (vsock.listener < 0 || !set_patience(vsock.listener)
        || bind(vsock.listener, (struct sockaddr *)&address, sizeof(address)) < 0
        || listen(vsock.listener, 1) < 0
        || pthread_create(&vsock.thread, NULL, vsock_thread, NULL) != 0) {
        fprintf(out, "no connections can be taken: %s", strerror(errno));
        if (vsock.listener >= 0) {
            close(vsock.listener);
        }
        return false;
    }
    vsock.running = true;
    return true;
}

bool vsock_stop(FILE *out)
{
    if (!vsock.running) {
        fprintf(out, "no connections are taken");
        return false;
    }
    vsock.stop = true;
    pthread_join(vsock.thread, NULL);
    vsock.running = false;
    close(vsock.listener);
    fprintf(out, "%lu", vsock.echoed);
    return true;
}

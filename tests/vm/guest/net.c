/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A thread that answers packets. The buffers are of the guest's kernel: whoever serves the network
 * device stores to them and loads from them. All words of a packet follow from its number, and
 * those of the answer from the same number in another way; tests/vm/net.py makes the same ones.
 */
#define _GNU_SOURCE
#include "guest.h"

#include <arpa/inet.h>
#include <errno.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <netpacket/packet.h>
#include <pthread.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#define DEVICE "eth0"
#define TYPE 0x88b5                             /* of Ethernet, for experiments */
#define ADDRESS 6ul
#define HEADER 14ul                             /* two addresses and the type */
#define SHORTEST 46ul
#define LONGEST 1500ul
#define WORDS (LONGEST / 8 + 1)
/* after which the thread looks whether it has to end */
#define STOP_MILLISECONDS 20

enum kind { REQUEST, ANSWER };

static struct {
    pthread_t thread;
    int socket;
    volatile bool stop;
    bool running;
    unsigned long echoed, wrong, unsent;
    char first[128];                            /* that was wrong */
} net = { .socket = -1 };

/* Returns its length. */
static size_t make_payload(uint8_t *to, uint64_t number, enum kind kind)
{
    uint64_t words[WORDS], key = mix(number << 1 | kind);
    size_t length = key & 3 ? SHORTEST + (key >> 2) % (LONGEST - SHORTEST + 1) : LONGEST;

    words[0] = number;
    for (size_t i = 1; i < WORDS; i++) {
        words[i] = mix(i) ^ key;
    }
    memcpy(to, words, length);
    return length;
}

static bool check_payload(const uint8_t *payload, size_t length, uint64_t number)
{
    uint8_t wanted[LONGEST];
    size_t wanted_length = make_payload(wanted, number, REQUEST), i = 0;

    if (length == wanted_length && memcmp(payload, wanted, length) == 0) {
        return true;
    }
    while (i < length && i < wanted_length && payload[i] == wanted[i]) {
        i++;
    }
    if (net.wrong++ == 0) {
        snprintf(net.first, sizeof(net.first),
                 "packet %#llx of %zu bytes, not %zu, is wrong from byte %zu on",
                 (unsigned long long)number, length, wanted_length, i);
    }
    return false;
}

static void *echo_thread(void *opaque)
{
    uint8_t packet[HEADER + LONGEST + ADDRESS];

    (void)opaque;
    while (!net.stop) {
        ssize_t got = recv(net.socket, packet, sizeof(packet), 0);
        uint64_t number;
        size_t length;

        if (got < (ssize_t)(HEADER + sizeof(number))) {         /* none came */
            continue;
        }
        memcpy(&number, packet + HEADER, sizeof(number));
        if (!check_payload(packet + HEADER, (size_t)got - HEADER, number)) {
            continue;
        }
        for (size_t i = 0; i < ADDRESS; i++) {
            uint8_t own = packet[i];

            packet[i] = packet[ADDRESS + i];
            packet[ADDRESS + i] = own;
        }
        length = HEADER + make_payload(packet + HEADER, number, ANSWER);
        if (send(net.socket, packet, length, 0) == (ssize_t)length) {
            net.echoed++;
        } else {
            net.unsent++;
        }
    }
    return NULL;
}

static bool open_socket(void)
{
    struct ifreq request = { .ifr_name = DEVICE };
    struct sockaddr_ll address = {.sll_family = AF_PACKET,
                                  .sll_protocol = htons(TYPE),
                                  .sll_ifindex = (int)if_nametoindex(DEVICE)};
    struct timeval wait = { .tv_usec = STOP_MILLISECONDS * 1000 };

    /* of no type, until it is bound to the device */
    net.socket = socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, 0);
    if (net.socket < 0 || address.sll_ifindex == 0
        || ioctl(net.socket, SIOCGIFFLAGS, &request) < 0) {
        return false;
    }
    request.ifr_flags |= IFF_UP;
    return ioctl(net.socket, SIOCSIFFLAGS, &request) == 0 &&
           setsockopt(net.socket, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait)) == 0 &&
           bind(net.socket, (struct sockaddr *)&address, sizeof(address)) == 0;
}

static void close_socket(void)
{
    if (net.socket >= 0) {
        close(net.socket);
    }
    net.socket = -1;
}

bool net_start(FILE *out)
{
    if (net.running) {
        fprintf(out, "packets are answered already");
        return false;
    }
    net.stop = false;
    net.echoed = net.wrong = net.unsent = 0;
    if (!open_socket() || pthread_create(&net.thread, NULL, echo_thread, NULL) != 0) {
        fprintf(out, DEVICE " cannot be used: %s", strerror(errno));
        close_socket();
        return false;
    }
    net.running = true;
    return true;
}

bool net_stop(FILE *out)
{
    if (!net.running) {
        fprintf(out, "no packets are answered");
        return false;
    }
    net.stop = true;
    pthread_join(net.thread, NULL);
    net.running = false;
    close_socket();
    if (net.wrong) {
        fprintf(out, "%lu packets are wrong: %s", net.wrong, net.first);
        return false;
    }
    fprintf(out, "%lu %lu", net.echoed, net.unsent);
    return true;
}

/* The driver resets each queue for that, and the buffers in it are lost. */
bool net_resize(unsigned entries, FILE *out)
{
    struct ethtool_ringparam ring = { .cmd = ETHTOOL_GRINGPARAM };
    struct ifreq request = { .ifr_name = DEVICE, .ifr_data = (char *)&ring };
    int fd = socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, 0);
    bool ok = fd >= 0 && ioctl(fd, SIOCETHTOOL, &request) == 0;

    if (ok) {
        fprintf(out, "%u %u", ring.rx_pending, ring.tx_pending);
        ring.cmd = ETHTOOL_SRINGPARAM;
        ring.rx_pending = ring.tx_pending = entries;
        ok = ioctl(fd, SIOCETHTOOL, &request) == 0;
    }
    if (ok) {
        ring.cmd = ETHTOOL_GRINGPARAM;
        ok = ioctl(fd, SIOCETHTOOL, &request) == 0;
    }
    if (!ok) {
        fprintf(out, " the queues of " DEVICE " cannot be made anew: %s", strerror(errno));
    } else if (ring.rx_pending != entries || ring.tx_pending != entries) {
        fprintf(out, " are %u and %u entries now", ring.rx_pending, ring.tx_pending);
        ok = false;
    }
    if (fd >= 0) {
        close(fd);
    }
    return ok;
}

/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Process 1 of a test guest: takes commands, a line each, from a port of the virtio console, and
 * answers each with one line, "ok ..." or "fail ...".
 */
#define _GNU_SOURCE
#include "guest.h"
#include "stores.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define DEVICE "/dev/dax0.0"
#define PORT "/dev/vport*p1"
#define PATIENCE 20000                          /* milliseconds for a device to appear */

static int port = -1;

static void say(const char *text, size_t length)
{
    while (length) {
        ssize_t done = write(port < 0 ? 2 : port, text, length);

        if (done <= 0) {
            return;
        }
        text += done;
        length -= (size_t)done;
    }
}

static void __attribute__((noreturn)) give_up(const char *what)
{
    char line[256];
    int length = snprintf(line, sizeof(line), "fail guest: %s: %s\n", what, strerror(errno));

    say(line, (size_t)length);
    for (;;) {
        pause();
    }
}

static void handle_fatal(int number, siginfo_t *info, void *context)
{
    char line[128];
    int length =
        snprintf(line, sizeof(line), "fail guest: signal %d at %p\n", number, info->si_addr);

    (void)context;
    errors_caught(number, info);
    say(line, (size_t)length);
    for (;;) {
        pause();
    }
}

static void load_modules(void)
{
    glob_t found;

    if (glob("/modules/*.ko", 0, NULL, &found) != 0) {
        return;
    }
    for (size_t i = 0; i < found.gl_pathc; i++) {
        int fd = open(found.gl_pathv[i], O_RDONLY | O_CLOEXEC);

        if (fd < 0 || (syscall(SYS_finit_module, fd, "", 0) < 0 && errno != EEXIST)) {
            give_up(found.gl_pathv[i]);
        }
        close(fd);
    }
    globfree(&found);
}

/* A device by its pattern, once it is there; in milliseconds of patience. */
static int wait_and_open(const char *pattern, int flags)
{
    glob_t found;
    int fd;

    for (int i = 0; i < PATIENCE && glob(pattern, 0, NULL, &found) != 0; i += 5) {
        usleep(5000);
    }
    if (glob(pattern, 0, NULL, &found) != 0) {
        errno = ENODEV;
        give_up(pattern);
    }
    /* ENXIO: its driver is not ready for it yet */
    for (int i = 0;
         (fd = open(found.gl_pathv[0], flags | O_CLOEXEC)) < 0 && errno == ENXIO && i < PATIENCE;
         i += 5) {
        usleep(5000);
    }
    if (fd < 0) {
        give_up(found.gl_pathv[0]);
    }
    globfree(&found);
    return fd;
}

static size_t device_size(void)
{
    char text[32] = "";
    int fd = open("/sys/bus/dax/devices/dax0.0/size", O_RDONLY | O_CLOEXEC);

    if (fd < 0 || read(fd, text, sizeof(text) - 1) <= 0) {
        give_up("size of " DEVICE);
    }
    close(fd);
    return strtoul(text, NULL, 0);
}

/* All of the device. Its node is there before its driver lets it be mapped: ENXIO until then. */
static void *map_device(int fd, size_t size)
{
    void *data = MAP_FAILED;

    for (int i = 0; i <= PATIENCE; i += 5) {
        /* executable, as one kind of store writes code */
        data = mmap(NULL, size, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_SHARED, fd, 0);
        if (data != MAP_FAILED || errno != ENXIO) {
            break;
        }
        usleep(5000);
    }
    return data;
}

static void map_memory(struct memory *memory)
{
    int fd = wait_and_open(DEVICE, O_RDWR);

    memory->threads = (unsigned)sysconf(_SC_NPROCESSORS_ONLN);
    if (memory->threads > MAX_THREADS) {
        memory->threads = MAX_THREADS;
    }
    layout_zones(memory, device_size());
    memory->data = map_device(fd, memory->size);
    memory->model = mmap(NULL, memory->size, PROT_READ | PROT_WRITE | PROT_EXEC,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory->data == MAP_FAILED || memory->model == MAP_FAILED) {
        give_up(DEVICE);
    }
    close(fd);
    layout_fill(memory->model, 0, memory->size, LEVEL_ACTIVE);
}

struct many_stores {
    size_t granule;
    uint64_t seed;
    unsigned long count;
};

static bool many_stores(struct memory *memory, unsigned index, void *opaque, FILE *out)
{
    const struct many_stores *many = opaque;
    struct store_job job = { memory, index, many->granule, many->seed, many->count };

    return stores_run(&job, out);
}

static bool perform(struct memory *memory, char *line, FILE *out)
{
    const char *name = strtok(line, " \n");
    unsigned long numbers[3] = { 0 };

    for (unsigned i = 0; i < 3; i++) {
        const char *word = strtok(NULL, " \n");

        numbers[i] = word ? strtoul(word, NULL, 0) : 0;
    }
    if (!name) {
        return false;
    }
    if (strcmp(name, "read") == 0) {
        return shared_read(memory, out);
    }
    if (strcmp(name, "stores-each") == 0) {
        fprintf(out, "%u kinds ", stores_kinds());
        return stores_run_each(memory, out);
    }
    if (strcmp(name, "stores") == 0) {          /* SEED COUNT GRANULE */
        struct many_stores many = { numbers[2], numbers[0], numbers[1] };

        return run_threads(memory, many_stores, &many, out);
    }
    if (strcmp(name, "lines") == 0) {
        return shared_lines(memory, numbers[0], out);
    }
    if (strcmp(name, "counters") == 0) {
        return shared_counters(memory, out);
    }
    if (strcmp(name, "fill") == 0) {
        return shared_fill(memory, numbers[0], out);
    }
    if (strcmp(name, "device-copy") == 0) {
        return device_copy(memory, out);
    }
    if (strcmp(name, "fpu-store") == 0) {
        return fpu_store(memory, out);
    }
    if (strcmp(name, "load-start") == 0) {
        load_start(memory);
        return true;
    }
    if (strcmp(name, "load-stop") == 0) {       /* and see that all of it is there */
        load_stop(memory);
        return load_check(memory, true, out);
    }
    if (strcmp(name, "load-check") == 0) {      /* what is there belongs to one moment */
        return load_check(memory, false, out);
    }
    if (strcmp(name, "load-adopt") == 0) {
        load_adopt(memory);
        return true;
    }
    /* LEVEL: what a snapshot that was made before the VM holds */
    if (strcmp(name, "level") == 0) {
        layout_fill(memory->model, 0, memory->size, (enum level)numbers[0]);
        return true;
    }
    if (strcmp(name, "transfers") == 0) {       /* SEED COUNT */
        return transfers_run(memory, numbers[0], (unsigned)numbers[1], out);
    }
    if (strcmp(name, "error-load") == 0) {      /* OFFSET in the image, as for the next ones */
        return errors_load(memory, numbers[0] - DATA_OFFSET, out);
    }
    if (strcmp(name, "error-store") == 0) {
        return errors_store(memory, numbers[0] - DATA_OFFSET, out);
    }
    if (strcmp(name, "error-change") == 0) {
        return errors_change(memory, numbers[0] - DATA_OFFSET, out);
    }
    if (strcmp(name, "error-input") == 0) {
        return errors_input(memory, numbers[0] - DATA_OFFSET, out);
    }
    if (strcmp(name, "error-output") == 0) {
        return errors_output(memory, numbers[0] - DATA_OFFSET, out);
    }
    if (strcmp(name, "error-slab") == 0) {
        return errors_slab(memory, numbers[0] - DATA_OFFSET, out);
    }
    if (strcmp(name, "error-disk-in") == 0 || strcmp(name, "error-disk-out") == 0) {
        return errors_transfer(memory, numbers[0] - DATA_OFFSET, strcmp(name, "error-disk-in") == 0,
                               out);
    }
    if (strcmp(name, "error-survey") == 0) {
        return errors_survey(memory, out);
    }
    if (strcmp(name, "clock") == 0) {
        return clock_tell(out);
    }
    if (strcmp(name, "trap") == 0) {
        return trap_on_each_cpu(memory->threads, out);
    }
    if (strcmp(name, "net-start") == 0) {
        return net_start(out);
    }
    if (strcmp(name, "net-stop") == 0) {
        return net_stop(out);
    }
    if (strcmp(name, "net-resize") == 0) {      /* ENTRIES of each queue */
        return net_resize((unsigned)numbers[0], out);
    }
    if (strcmp(name, "vsock-start") == 0) {     /* PORT */
        return vsock_start((unsigned)numbers[0], out);
    }
    if (strcmp(name, "vsock-stop") == 0) {
        return vsock_stop(out);
    }
    if (strcmp(name, "save") == 0) {
        return transfers_save(memory, "/dev/vdb", out);
    }
    fprintf(out, "no command %s", name);
    return false;
}

static void answer(bool ok, char *text)
{
    char line[4096];

    for (char *at = text; *at; at++) {
        if (*at == '\n') {
            *at = ' ';
        }
    }
    snprintf(line, sizeof(line) - 1, "%s %s", ok ? "ok" : "fail", text);
    strcat(line, "\n");
    say(line, strlen(line));
}

static void serve(struct memory *memory)
{
    char line[256];
    size_t length = 0;

    for (;;) {
        char *text = NULL;
        size_t text_length;
        FILE *out;
        bool ok;
        ssize_t got = read(port, line + length, 1);

        if (got <= 0) {                         /* nobody has opened the other end yet */
            usleep(10000);
            continue;
        }
        length += (size_t)got;
        if (line[length - 1] != '\n' && length < sizeof(line) - 1) {
            continue;
        }
        line[length - 1] = 0;
        length = 0;
        if (strcmp(line, "power-off") == 0) {
            sync();
            reboot(RB_POWER_OFF);
        }
        out = open_memstream(&text, &text_length);
        ok = perform(memory, line, out);
        fclose(out);
        answer(ok, text);
        free(text);
    }
}

int init_main(void)
{
    struct memory memory;
    struct sigaction action = { .sa_sigaction = handle_fatal, .sa_flags = SA_SIGINFO };
    char line[64];

    mkdir("/proc", 0755);
    mkdir("/sys", 0755);
    mkdir("/dev", 0755);
    mount("proc", "/proc", "proc", 0, NULL);
    mount("sysfs", "/sys", "sysfs", 0, NULL);
    mount("devtmpfs", "/dev", "devtmpfs", 0, NULL);
    load_modules();
    port = wait_and_open(PORT, O_RDWR);
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
    sigaction(SIGILL, &action, NULL);
    sigaction(SIGABRT, &action, NULL);
    map_memory(&memory);
    say(line, (size_t)snprintf(line, sizeof(line), "ready %zu %u\n", memory.size, memory.threads));
    serve(&memory);
    return 0;
}

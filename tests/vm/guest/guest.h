/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The program that runs as process 1 of the small test guests, with an image mapped through
 * /dev/dax0.0. What it knows of the memory it keeps in ordinary RAM, the model: everything is done
 * to both, and every byte is compared.
 *
 * The same program, run on the host side, makes the content that the images start with (layout.c).
 */
#ifndef PCOW_VM_GUEST_H
#define PCOW_VM_GUEST_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define PAGE 4096ul
#define SLAB (2ul << 20)
/* of the image: in front of it lies the info block of the DAX device */
#define DATA_OFFSET SLAB
#define MAX_THREADS 16

/* Where the content of a page comes from; each is above the one before. */
enum level {
    LEVEL_ABSENT,
    LEVEL_BASE,
    LEVEL_MIDDLE,
    LEVEL_FIRST,
    LEVEL_SECOND,
    LEVEL_ACTIVE,
    LEVEL_DISK
};

struct zone {
    size_t begin, length;                       /* bytes from the start of the data */
};

struct memory {
    uint8_t *data;                              /* the image */
    uint8_t *model;                             /* what must be in it */
    size_t size;
    struct zone stores, load, transfers;
    unsigned threads;
};

/* layout.c */
uint64_t mix(uint64_t value);
void layout_zones(struct memory *memory, size_t size);
enum level layout_level(size_t page);
void layout_fill(uint8_t *to, size_t offset, size_t length, enum level level);
void layout_disk(uint8_t *to, size_t offset, size_t length);
int layout_write_raw(enum level level, size_t image_size, const char *path);
int layout_write_disk(size_t size, const char *path);
int layout_print_script(size_t image_size);

/*
 * stores.c: COUNT stores of all kinds to the granules that belong to thread INDEX; false: a byte is
 * wrong, told on OUT
 */
struct store_job {
    struct memory *memory;
    unsigned index;
    size_t granule;
    uint64_t seed;
    unsigned long count;
};
bool stores_run(const struct store_job *job, FILE *out);
bool stores_run_each(struct memory *memory, FILE *out);
unsigned stores_kinds(void);

/* shared.c: threads that meet on the same pages */
bool shared_lines(struct memory *memory, uint64_t seed, FILE *out);
bool shared_counters(struct memory *memory, FILE *out);
bool shared_read(struct memory *memory, FILE *out);
bool shared_fill(struct memory *memory, uint64_t seed, FILE *out);

/* device.c: to every page */
bool device_copy(struct memory *memory, FILE *out);
bool fpu_store(struct memory *memory, FILE *out);

/*
 * load.c: an endless sequence of page writes per thread; a state of the memory belongs to a moment
 * of it, or it is torn
 */
void load_start(struct memory *memory);
void load_stop(struct memory *memory);
bool load_check(struct memory *memory, bool stopped, FILE *out);
/* take it over into the model, after it was checked */
void load_adopt(struct memory *memory);

/* transfers.c: disk I/O to and from the memory, without a copy in between */
bool transfers_run(struct memory *memory, uint64_t seed, unsigned count, FILE *out);
bool transfers_save(const struct memory *memory, const char *disk, FILE *out);

/* dax.c: the same with a file that is mapped */
bool dax_transfers(unsigned threads, const char *path, FILE *out);

/*
 * errors.c: accesses that may fail, which they say on OUT ("failed"); false if the guest was told
 * something else than that
 */
/* in a signal handler: does not return if it was expected */
void errors_caught(int number, const siginfo_t *info);
bool errors_load(const struct memory *memory, size_t offset, FILE *out);
bool errors_store(struct memory *memory, size_t offset, FILE *out);
bool errors_change(struct memory *memory, size_t offset, FILE *out);
bool errors_input(struct memory *memory, size_t offset, FILE *out);
bool errors_output(const struct memory *memory, size_t offset, FILE *out);
bool errors_slab(struct memory *memory, size_t offset, FILE *out);
bool errors_transfer(struct memory *memory, size_t offset, bool in, FILE *out);
bool errors_survey(const struct memory *memory, FILE *out);

/* clock.c: the milliseconds since boot, and the clock that counts them */
bool clock_tell(FILE *out);

/* trap.c: a debug exception on every CPU */
bool trap_on_each_cpu(unsigned cpus, FILE *out);

/*
 * net.c: packets are answered from start to stop, which tells how many; false: one of them had a
 * wrong byte
 */
bool net_start(FILE *out);
bool net_stop(FILE *out);
/* makes the queues anew; tells how long they were */
bool net_resize(unsigned entries, FILE *out);

/* vsock.c: connections are taken from start to stop, which tells how many bytes were sent back */
bool vsock_start(unsigned port, FILE *out);
bool vsock_stop(FILE *out);

/* compare.c: false and a line on OUT if the image is not what the model says */
bool compare(const struct memory *memory, size_t offset, size_t length, const char *what,
             FILE *out);

/* Run FUNCTION in every thread with its index; false if one of them says so. */
typedef bool thread_fn(struct memory *memory, unsigned index, void *opaque, FILE *out);
bool run_threads(struct memory *memory, thread_fn *function, void *opaque, FILE *out);

/* init.c */
int init_main(void);

#endif

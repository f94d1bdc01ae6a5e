/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The mirror follows a writer that runs, a minute behind: else nothing would judge, after a crash
 * of the host, what was stored since the VM was started. Owner words and page bitmaps, which guests
 * store to; what operations alone change waits for the end of the writer. Not in class page-cache,
 * where no checksum counts while a writer runs.
 *
 * A page is taken while nobody stores to metadata: copied, its word *stale* once more but with a
 * number of its own, and its bit taken away. Who stores to it from then on marks it as for the
 * first time, with the ordinary *stale*. When page and copy are on the medium the word becomes
 * valid, if it is still the one that was left there. At the end each page that was followed, and
 * has not its checksum any more, is compared with what is known of it, as all that are marked.
 *
 * Nobody who stores waits for that, and nothing waits for who stores: stores are counted as they
 * begin and end (mirror_begin_store()). Who takes a page reads the count before, and once more
 * after he has taken the bit away. Either the one who stores sees that, and marks; or he is seen,
 * and the page stays as it was.
 */
#ifndef PCOW_IMAGE_MIRROR_FOLLOW_H
#define PCOW_IMAGE_MIRROR_FOLLOW_H

#include "image/mirror.h"

/* pages of a round; what is more is the next one's */
#define MIRROR_ROUND_PAGES 512u

struct mirror_round {
    uint32_t number;                   /* of the last page that was taken, in all rounds */
    unsigned count;
    unsigned left;                     /* that could not be taken this time */
    uint64_t next;                     /* bit of the page that is looked at next */
    struct mirror_taken {
        uint64_t group;
        unsigned page;
        uint32_t checksum, number;
    } taken[MIRROR_ROUND_PAGES];
};

/* How many marks were made. Async-signal-safe. */
static inline uint64_t mirror_marks(const struct file *file)
{
    return __atomic_load_n(&file->marks, __ATOMIC_SEQ_CST);
}

/*
 * Take a page or more, if there are any that can be: true if there may be more. One thread's. What
 * known says of a page must not change meanwhile but by stores that are counted. A page that is not
 * what it is known to be is left to the end, which tells.
 */
bool mirror_take_pages(struct file *file, const struct mirror_known *known,
                       struct mirror_round *round);
/*
 * Those that were taken get their checksums: 0, or an error, and they are marked as before. The
 * next round begins; left stays.
 */
int mirror_end_round(struct file *file, struct mirror_round *round);

#endif

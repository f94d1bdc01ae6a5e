/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The last moment of a VM: what its checkpoint is called, and the room that is
 * kept for that.
 *
 * It is taken when the VM is stopped, by its name, whoever asks for it: QEMU
 * itself at a signal, or who ends it.  What others ask for is no reason to use
 * what is kept: the VM would run on without it.
 */
#include "qemu/osdep.h"
#include "migration/pcow/checkpoint.h"
#include "qemu/units.h"
#include "system/runstate.h"

/* Of a usual VM several times what it has, without RAM that is no image */
#define LEAST_STATE (4 * MiB)

static char *prefix;            /* of its name; NULL: there is none */
static uint64_t known;          /* bytes of the state that was taken last */

/* What the guest does in between, and what is plugged, makes it larger. */
static void keep_room(void)
{
    HostMemPcow *home = prefix ? checkpoint_find_home() : NULL;

    hostmem_pcow_keep_spare(home, checkpoint_other_ram() +
                                  MAX(LEAST_STATE, known + known / 2));
}

void checkpoint_set_last(const char *wanted)
{
    g_free(prefix);
    prefix = g_strdup(wanted);
    keep_room();
}

const char *checkpoint_last_prefix(void)
{
    return prefix;
}

bool checkpoint_is_last(const char *name)
{
    return prefix && g_str_has_prefix(name, prefix) && !runstate_is_running();
}

void checkpoint_note_size(uint64_t size)
{
    known = size;
    keep_room();
}

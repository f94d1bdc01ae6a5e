/* SPDX-License-Identifier: BSD-3-Clause */
#include "monitor/engine.h"

#include <stddef.h>

static const struct engine *const table[] = {
    [PCOW_ENGINE_AUTO] = &engine_signal,
    [PCOW_ENGINE_SIGNAL] = &engine_signal,
    [PCOW_ENGINE_KVM] = &engine_kvm,
    [PCOW_ENGINE_MINOR] = &engine_minor,
};

const struct engine *engine_find(enum pcow_engine number)
{
    return number < sizeof table / sizeof *table ? table[number] : NULL;
}

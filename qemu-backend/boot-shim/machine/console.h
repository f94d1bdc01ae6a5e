/* SPDX-License-Identifier: BSD-3-Clause */
/* The menu on the console. */
#ifndef SHIM_MACHINE_CONSOLE_H
#define SHIM_MACHINE_CONSOLE_H

#include "config/menu.h"

/* Keys one by one, without echo; what was typed before is forgotten. */
void console_open(void);
/* As it was. */
void console_close(void);
/* Whether a key came within some milliseconds. */
bool console_key(long milliseconds);
/* Ask which item; the one that is the default after a minute without a key. */
size_t console_ask(const struct menu *menu);
/* Milliseconds since the machine started. */
long console_clock(void);

#endif

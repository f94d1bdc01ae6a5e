/* SPDX-License-Identifier: BSD-3-Clause */
/* Parts of the JSON that the benchmark and the soak share. */
#ifndef BENCH_DOCUMENT_H
#define BENCH_DOCUMENT_H

#include <json.h>

#include "bench.h"

json_object *document_machine(const struct bench *bench);
/* Write document to path, or to stdout if that is NULL, and release it.  Returns an exit status. */
int document_put(json_object *document, const char *path);

#endif

/* The functions of autobyte.h, as C sees them. A child of fork() has none of
 * the threads of Go's runtime, and a call into it might never return. So that
 * is decided here, before Go. */
#include <pthread.h>
#include <string.h>

#include "autobyte.h"

#include "_cgo_export.h"

static int forked; /* written once, in the only thread of a child */

static void note_fork(void) { forked = 1; }

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, note_fork); }

static const char reason[] =
    "this process was forked from one that had loaded AutoByte: a child (a DataLoader worker, say) must not use "
    "the model's gradients or the optimizer; start it with spawn, or leave training to the parent";

#define GUARDED(name, parameters, arguments) \
  int ab_##name parameters { return forked ? AB_ERROR : go_##name arguments; }

GUARDED(version, (char *buf, int len),
        (buf, len))
GUARDED(open, (const char *options, int *handle),
        ((char *)options, handle))
GUARDED(rendezvous, (int handle, char *buf, int len),
        (handle, buf, len))
GUARDED(join, (int handle, const char *rendezvous),
        (handle, (char *)rendezvous))
GUARDED(joined, (int handle, int wait_ms),
        (handle, wait_ms))
GUARDED(check, (int handle, const char *what),
        (handle, (char *)what))
GUARDED(settings, (int handle, char *buf, int len),
        (handle, buf, len))
GUARDED(set_tensors, (int handle, const char *tensors, const int32_t *order, int order_len),
        (handle, (char *)tensors, (int32_t *)order, order_len))
GUARDED(layout, (int handle, int wait_ms, int64_t *offsets, int32_t *order, int tensors, int64_t *space_bytes, int spaces),
        (handle, wait_ms, offsets, order, tensors, space_bytes, spaces))
GUARDED(ready, (int handle, int tensor, int wait_ms),
        (handle, tensor, wait_ms))
GUARDED(close_pass, (int handle, int end_of_step, uint64_t *pass, int *absent),
        (handle, end_of_step, pass, absent))
GUARDED(absent, (int handle, uint64_t pass, int wait_ms, int32_t *tensors, int max, int *count),
        (handle, pass, wait_ms, tensors, max, count))
GUARDED(wait, (int handle, int tensor, int limit, int wait_ms, int *run),
        (handle, tensor, limit, wait_ms, run))
GUARDED(drain, (int handle, int wait_ms),
        (handle, wait_ms))
GUARDED(next, (int handle, int wait_ms, ab_op *op),
        (handle, wait_ms, op))
GUARDED(sent, (int handle, uint64_t step, int index),
        (handle, step, index))
GUARDED(done, (int handle, uint64_t step, int index),
        (handle, step, index))
GUARDED(failed, (int handle, uint64_t step, int index, const char *why),
        (handle, step, index, (char *)why))
GUARDED(configure, (int handle, const char *settings, uint64_t first_pass),
        (handle, (char *)settings, first_pass))
GUARDED(stats, (int handle, char *buf, int len),
        (handle, buf, len))
GUARDED(waiting_for, (int handle, char *buf, int len),
        (handle, buf, len))
GUARDED(stop, (int handle),
        (handle))
GUARDED(wait_idle, (int handle, int wait_ms, int *left),
        (handle, wait_ms, left))
GUARDED(shutdown, (int handle, const char *reason),
        (handle, (char *)reason))

int ab_errmsg(int handle, char *buf, int len) {
  if (!forked) return go_errmsg(handle, buf, len);
  if (buf && len > 0) {
    strncpy(buf, reason, len - 1);
    buf[len - 1] = 0;
  }
  return sizeof reason - 1;
}

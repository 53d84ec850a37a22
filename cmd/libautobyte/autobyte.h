/*
 * AutoByte's C interface: one rank of one data-parallel model.
 *
 * Conventions
 *  - Every function returns AB_OK, AB_AGAIN, AB_STOPPED or AB_ERROR, except
 *    where it says otherwise. After AB_ERROR, ab_errmsg() has the reason.
 *  - A handle is an integer above 0. Handle 0 in ab_errmsg() means ab_open().
 *  - wait_ms bounds how long a call may block; 0 only looks. When the time is
 *    over the call returns AB_AGAIN: look at your signals, then call again.
 *  - Buffers belong to the caller. A function that fills a text buffer writes
 *    at most len bytes with a final 0 and returns the length of the whole text
 *    (without the 0), or AB_ERROR; if that is len or more, the text was cut.
 *  - No function calls back, keeps a pointer, changes signals or exits. Any
 *    thread may call, but ab_ready, ab_close_pass and ab_set_tensors belong to
 *    the one thread that trains, and ab_next to one thread that issues.
 *  - After fork() the child may not call anything: it gets AB_ERROR, always.
 *
 * Words: a tensor is one parameter's gradient and is named by its index in the
 * list given to ab_set_tensors. A pass is one backward pass; passes count from
 * 1. A space is one flat buffer; a partition is a range of it.
 */
#ifndef AUTOBYTE_H
#define AUTOBYTE_H

#include <stdint.h>

#define AB_OK 0       /* done */
#define AB_AGAIN 1    /* not yet: the wait is over */
#define AB_STOPPED 2  /* this rank was stopped with ab_stop() */
#define AB_ERROR (-1) /* see ab_errmsg() */

/* One partition to reduce: sum, over all ranks, the bytes from offset to
 * offset + bytes of a space, in place. */
typedef struct {
  uint64_t step;  /* the pass it belongs to */
  int32_t index;  /* its number in the pass's plan */
  int32_t space;
  int64_t offset; /* bytes from the start of the space */
  int64_t bytes;
} ab_op;

#ifndef AUTOBYTE_TYPES_ONLY

/* The version, such as "0.1.0". Returns the length of the text. */
int ab_version(char *buf, int len);

/* Starts one rank. options is JSON:
 *   {"rank": 0, "world": 2, "job": "name", "incarnation": 0, "timeout_s": 60,
 *    "port": 0, "interface": "", "settings": {"partition": bytes, "credit": bytes,
 *    "fusion": bytes, "lanes": n, "policy": "priority"|"fifo"},
 *    "tensors": [{"name": "", "dtype": "float32", "shape": [4, 3], "bytes": 48, "space": 0}],
 *    "log": false}
 * bytes of a tensor that is not trainable are 0. Settings left out get defaults
 * that follow from the sum of bytes. With "log" true it writes to stderr.
 * Rank 0 listens at once for the control connections of the others. */
int ab_open(const char *options, int *handle);

/* Rank 0: where the others find it, as JSON to be handed to their ab_join().
 * It holds the job's secret. Returns the length of the text. */
int ab_rendezvous(int handle, char *buf, int len);

/* Starts to meet the other ranks. rendezvous is NULL on rank 0. */
int ab_join(int handle, const char *rendezvous);

/* Waits until all ranks have met and have the same tensors. */
int ab_joined(int handle, int wait_ms);

/* Looks whether this rank can go on: an error if it has failed, or if a rank is
 * lost, or left over 2 seconds ago. For waits that this library has no part in;
 * what, or NULL, is named in the error as what waits. */
int ab_check(int handle, const char *what);

/* The settings in force (rank 0's, once joined) as JSON. Returns the length. */
int ab_settings(int handle, char *buf, int len);

/* Gives this rank's trainable tensors (JSON, as in ab_open) in registration
 * order, and on rank 0 their indices in forward order (elsewhere NULL, 0).
 * Allowed while nothing is under way; a second call changes the layout. */
int ab_set_tensors(int handle, const char *tensors, const int32_t *order, int order_len);

/* Waits for the layout: fills the offset in bytes of each tensor in its space,
 * the tensors in forward order, and the size in bytes of each space. */
int ab_layout(int handle, int wait_ms, int64_t *offsets, int32_t *order, int tensors, int64_t *space_bytes, int spaces);

/* A tensor's gradient lies in its place. The first call of a pass opens it. */
int ab_ready(int handle, int tensor, int wait_ms);

/* Ends the pass that is open, if any, and with end_of_step the optimizer's
 * step too. Tensors that were not ready take part with what lies in their
 * place. Fills the pass (0 if none was open) and the number of such tensors. */
int ab_close_pass(int handle, int end_of_step, uint64_t *pass, int *absent);

/* For a pass that ab_close_pass() reported absent tensors for: waits until it
 * is known which tensors had no gradient on any rank, and fills up to max of
 * their indices and their number. Once for each such pass. */
int ab_absent(int handle, uint64_t pass, int wait_ms, int32_t *tensors, int max, int *count);

/* Waits until a tensor is reduced in the last pass it took part in. Fills run
 * (which may be NULL) with how many tensors are, counted from this one in
 * forward order, up to limit. */
int ab_wait(int handle, int tensor, int limit, int wait_ms, int *run);

/* Waits until every pass that this rank has closed is reduced. */
int ab_drain(int handle, int wait_ms);

/* The next partition to issue. Collectives must be issued in this order. */
int ab_next(int handle, int wait_ms, ab_op *op);

/* Answers for an operation of ab_next: its bytes have left (optional), it is
 * reduced, or it failed and why. */
int ab_sent(int handle, uint64_t step, int index);
int ab_done(int handle, uint64_t step, int index);
int ab_failed(int handle, uint64_t step, int index, const char *why);

/* Changes settings (JSON, as in ab_open; what is left out stays) from a pass
 * on, at the earliest the next to begin. Only rank 0's call has an effect. */
int ab_configure(int handle, const char *settings, uint64_t first_pass);

/* What this rank has done, as JSON with units in the keys; and one line that
 * says what it waits for. Both return the length of the text. */
int ab_stats(int handle, char *buf, int len);
int ab_waiting_for(int handle, char *buf, int len);

/* Ends the issuing: ab_next returns AB_STOPPED from now on, waits fail. */
int ab_stop(int handle);

/* Waits until every operation handed out by ab_next is answered; fills how
 * many are not. */
int ab_wait_idle(int handle, int wait_ms, int *left);

/* Leaves the job and frees the handle, within seconds. reason is NULL or ""
 * for a goodbye, otherwise the other ranks are told why this one stops. */
int ab_shutdown(int handle, const char *reason);

/* The last error of a handle. Returns the length of the text. */
int ab_errmsg(int handle, char *buf, int len);

#endif /* AUTOBYTE_TYPES_ONLY */
#endif

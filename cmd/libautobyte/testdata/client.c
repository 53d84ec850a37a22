/* A client of autobyte.h, compiled and run by abi_test.go. Its argument is the
 * name of a check; it exits with 0 or says what is wrong. */
#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "autobyte.h"

static_assert(sizeof(ab_op) == 32, "the layout of ab_op, which other languages copy");
static_assert(offsetof(ab_op, index) == 8 && offsetof(ab_op, space) == 12, "see above");
static_assert(offsetof(ab_op, offset) == 16 && offsetof(ab_op, bytes) == 24, "see above");

#define TENSORS "[{\"name\": \"first\", \"dtype\": \"float32\", \"shape\": [300], \"bytes\": 1200, \"space\": 0}," \
                " {\"name\": \"last\", \"dtype\": \"float32\", \"shape\": [50], \"bytes\": 200, \"space\": 0}]"

static void fail(int line, int handle, const char *what, int got) {
  char why[2000] = "";
  ab_errmsg(handle, why, sizeof why);
  fprintf(stderr, "client.c:%d: %s is %d (%s)\n", line, what, got, why);
  exit(1);
}

/* EXPECT compares a call's result with what is wanted; OK is EXPECT of AB_OK. */
#define EXPECT(handle, want, call)                              \
  do {                                                          \
    int got_ = (call);                                          \
    if (got_ != (want)) fail(__LINE__, (handle), #call, got_);  \
  } while (0)
#define OK(handle, call) EXPECT(handle, AB_OK, call)

/* REFUSED wants AB_ERROR and a word in the message. */
#define REFUSED(handle, word, call)                                   \
  do {                                                                \
    char why_[2000] = "";                                             \
    EXPECT(handle, AB_ERROR, call);                                   \
    ab_errmsg((handle), why_, sizeof why_);                           \
    if (!strstr(why_, (word))) fail(__LINE__, (handle), #call ": no \"" word "\" in its error", 0); \
  } while (0)

/* AWAIT calls again while the answer is AB_AGAIN, at most a minute. */
#define AWAIT(handle, call)                                                   \
  do {                                                                        \
    int code_ = AB_AGAIN;                                                     \
    for (int n_ = 0; n_ < 1200 && code_ == AB_AGAIN; n_++) code_ = (call);    \
    if (code_ != AB_OK) fail(__LINE__, (handle), #call, code_);               \
  } while (0)

static int open_rank(int rank, const char *more) {
  char options[2000];
  int handle = 0;
  snprintf(options, sizeof options, "{\"rank\": %d, \"world\": 2, \"job\": \"c\", \"timeout_s\": 60, \"tensors\": %s%s}",
           rank, TENSORS, more);
  OK(0, ab_open(options, &handle));
  return handle;
}

/* -- a job of two ranks in two threads, each with a thread that issues */

enum { STEPS = 30, SPACE = 400 };

static struct {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  char rendezvous[4000];
  ab_op op[2]; /* what each rank has issued and the other has not answered */
  int issued[2], summed;
  float *memory[2];
} job = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, "", {{0}}, {0}, 0, {0}};

struct rank {
  int number, handle;
};

/* An all-reduce: both ranks come with the same operation, and leave with sums. */
static void all_reduce(int rank, const ab_op *op) {
  pthread_mutex_lock(&job.lock);
  int round = job.issued[rank]++;
  job.op[rank] = *op;
  if (job.issued[1 - rank] > round) {
    if (memcmp(&job.op[0], &job.op[1], sizeof(ab_op)) != 0) {
      fprintf(stderr, "the ranks issue step %llu partition %d and step %llu partition %d\n",
              (unsigned long long)job.op[0].step, job.op[0].index, (unsigned long long)job.op[1].step, job.op[1].index);
      exit(1);
    }
    for (int64_t i = op->offset / 4; i < (op->offset + op->bytes) / 4; i++)
      job.memory[0][i] = job.memory[1][i] = job.memory[0][i] + job.memory[1][i];
    job.summed++;
    pthread_cond_broadcast(&job.changed);
  }
  while (job.summed <= round) pthread_cond_wait(&job.changed, &job.lock);
  pthread_mutex_unlock(&job.lock);
}

static void *issue(void *argument) {
  struct rank *me = argument;
  ab_op op;
  for (;;) {
    int code = ab_next(me->handle, 50, &op);
    if (code == AB_AGAIN) continue;
    if (code == AB_STOPPED) return NULL;
    if (code != AB_OK) fail(__LINE__, me->handle, "ab_next", code);
    all_reduce(me->number, &op);
    if (op.index % 2) OK(me->handle, ab_sent(me->handle, op.step, op.index));
    OK(me->handle, ab_done(me->handle, op.step, op.index));
  }
}

static void *train(void *argument) {
  struct rank *me = argument;
  int h = me->handle, absent, count, run;
  uint64_t pass;
  int64_t offsets[2], size[1];
  int32_t order[2], forward[2] = {0, 1}, nowhere[2];
  pthread_t issuer;

  OK(h, ab_join(h, me->number == 0 ? NULL : job.rendezvous));
  AWAIT(h, ab_joined(h, 50));
  OK(h, ab_check(h, "nothing"));
  OK(h, ab_set_tensors(h, TENSORS, me->number == 0 ? forward : NULL, me->number == 0 ? 2 : 0));
  AWAIT(h, ab_layout(h, 50, offsets, order, 2, size, 1));
  if (order[0] != 0 || order[1] != 1 || size[0] > (int64_t)(SPACE * sizeof(float))) fail(__LINE__, h, "the layout", order[0]);
  if (pthread_create(&issuer, NULL, issue, me)) exit(2);

  for (int step = 0; step < STEPS; step++) {
    if (step == STEPS / 2) OK(h, ab_configure(h, "{\"partition\": 128, \"fusion\": 0}", 0));
    int skips_last = step % 3 == 2; /* on both ranks: no gradient anywhere */
    for (int tensor = 1; tensor >= 0; tensor--) {
      float *view = job.memory[me->number] + offsets[tensor] / 4;
      int skip = tensor == 1 && skips_last;
      AWAIT(h, ab_wait(h, tensor, 1, 50, &run));
      for (int i = 0; i < (tensor ? 50 : 300); i++) view[i] = skip ? 0 : step + me->number;
      if (!skip) AWAIT(h, ab_ready(h, tensor, 50));
    }
    OK(h, ab_close_pass(h, 1, &pass, &absent));
    if (pass != (uint64_t)step + 1 || absent != skips_last) fail(__LINE__, h, "absent tensors", absent);
    if (skips_last) {
      AWAIT(h, ab_absent(h, pass, 50, nowhere, 2, &count));
      if (count != 1 || nowhere[0] != 1) fail(__LINE__, h, "tensors without a gradient", count);
    }
    AWAIT(h, ab_wait(h, 0, 2, 50, NULL));
    for (int i = 0; i < 300; i++)
      if (job.memory[me->number][offsets[0] / 4 + i] != 2 * step + 1) fail(__LINE__, h, "a sum of step", step);
  }
  AWAIT(h, ab_drain(h, 50));
  char text[4000];
  if (ab_stats(h, text, sizeof text) <= 0 || !strstr(text, "\"steps\":30")) fail(__LINE__, h, text, 0);
  if (ab_waiting_for(h, text, sizeof text) <= 0) fail(__LINE__, h, "ab_waiting_for", 0);
  if (ab_settings(h, text, sizeof text) <= 0 || !strstr(text, "\"partition\":128")) fail(__LINE__, h, text, 0);
  OK(h, ab_stop(h));
  pthread_join(issuer, NULL);
  OK(h, ab_wait_idle(h, 1000, &count));
  if (count != 0) fail(__LINE__, h, "operations left", count);
  OK(h, ab_shutdown(h, NULL));
  return NULL;
}

static void check_train(void) {
  struct rank ranks[2];
  pthread_t threads[2];
  for (int i = 0; i < 2; i++) {
    job.memory[i] = calloc(SPACE, sizeof(float));
    ranks[i] = (struct rank){i, open_rank(i, ", \"settings\": {\"partition\": 256, \"credit\": 512}")};
  }
  if (ab_rendezvous(ranks[0].handle, job.rendezvous, sizeof job.rendezvous) >= (int)sizeof job.rendezvous) exit(2);
  for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, train, &ranks[i]);
  for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
}

/* -- what a caller can get wrong */

static void every_function_refuses(int h, const char *word) {
  char text[100];
  int n;
  uint64_t pass;
  int64_t wide[2];
  int32_t narrow[2];
  ab_op op;
#define REFUSED_HERE(call)                                              \
  do {                                                                  \
    char why_[2000] = "";                                               \
    EXPECT(h, AB_ERROR, call);                                          \
    ab_errmsg(h, why_, sizeof why_);                                    \
    if (!strstr(why_, word)) fail(__LINE__, h, #call " gives another error", 0); \
  } while (0)
  REFUSED_HERE(ab_rendezvous(h, text, sizeof text));
  REFUSED_HERE(ab_join(h, NULL));
  REFUSED_HERE(ab_joined(h, 0));
  REFUSED_HERE(ab_check(h, "x"));
  REFUSED_HERE(ab_settings(h, text, sizeof text));
  REFUSED_HERE(ab_set_tensors(h, TENSORS, NULL, 0));
  REFUSED_HERE(ab_layout(h, 0, wide, narrow, 2, wide, 1));
  REFUSED_HERE(ab_ready(h, 0, 0));
  REFUSED_HERE(ab_close_pass(h, 1, &pass, &n));
  REFUSED_HERE(ab_absent(h, 1, 0, narrow, 2, &n));
  REFUSED_HERE(ab_wait(h, 0, 1, 0, &n));
  REFUSED_HERE(ab_drain(h, 0));
  REFUSED_HERE(ab_next(h, 0, &op));
  REFUSED_HERE(ab_sent(h, 1, 0));
  REFUSED_HERE(ab_done(h, 1, 0));
  REFUSED_HERE(ab_failed(h, 1, 0, "x"));
  REFUSED_HERE(ab_configure(h, "{}", 0));
  REFUSED_HERE(ab_stats(h, text, sizeof text));
  REFUSED_HERE(ab_waiting_for(h, text, sizeof text));
  REFUSED_HERE(ab_stop(h));
  REFUSED_HERE(ab_wait_idle(h, 0, &n));
  REFUSED_HERE(ab_shutdown(h, NULL));
}

static void check_handles(void) {
  int h = open_rank(0, "");
  OK(h, ab_shutdown(h, "a reason"));
  every_function_refuses(h, "is not open");
  int next = open_rank(0, "");
  if (next == h) fail(__LINE__, h, "a new handle, the old one's number,", next);
  OK(next, ab_shutdown(next, NULL));
  every_function_refuses(0, "is not open");
  every_function_refuses(-1, "is not open");
  every_function_refuses(2147483647, "is not open");
}

static void check_nulls(void) {
  int h = 0, n;
  uint64_t pass;
  int64_t wide[2];
  int32_t narrow[2];
  REFUSED(0, "handle: NULL", ab_open("{}", NULL));
  REFUSED(0, "options: NULL", ab_open(NULL, &h));
  REFUSED(0, "options: ", ab_open("{", &h));
  REFUSED(0, "world size is 0", ab_open("{}", &h));
  if (h != 0) fail(__LINE__, 0, "the handle of a failed ab_open", h);
  h = open_rank(0, "");
  REFUSED(h, "tensors: NULL", ab_set_tensors(h, NULL, NULL, 0));
  REFUSED(h, "NULL", ab_layout(h, 0, NULL, narrow, 2, wide, 1));
  REFUSED(h, "NULL", ab_layout(h, 0, wide, NULL, 2, wide, 1));
  REFUSED(h, "NULL", ab_layout(h, 0, wide, narrow, 2, NULL, 1));
  REFUSED(h, "NULL", ab_close_pass(h, 1, NULL, &n));
  REFUSED(h, "NULL", ab_close_pass(h, 1, &pass, NULL));
  REFUSED(h, "NULL", ab_absent(h, 1, 0, NULL, 2, &n));
  REFUSED(h, "NULL", ab_absent(h, 1, 0, narrow, 2, NULL));
  REFUSED(h, "NULL", ab_next(h, 0, NULL));
  REFUSED(h, "NULL", ab_wait_idle(h, 0, NULL));
  REFUSED(h, "settings: NULL", ab_configure(h, NULL, 0));
  REFUSED(h, "not under way", ab_failed(h, 1, 0, NULL));
  OK(h, ab_check(h, NULL));
  OK(h, ab_shutdown(h, NULL));
}

static void check_texts(void) {
  char text[400], part[8];
  int length = ab_version(text, sizeof text);
  if (length <= 0 || (int)strlen(text) != length) fail(__LINE__, 0, "ab_version", length);
  EXPECT(0, length, ab_version(NULL, 0));
  EXPECT(0, length, ab_version(NULL, 100));
  EXPECT(0, length, ab_version(text, -5));
  memset(part, 'x', sizeof part);
  EXPECT(0, length, ab_version(part, 3));
  if (part[2] != 0 || part[3] != 'x' || memcmp(part, text, 2) != 0) fail(__LINE__, 0, "a cut text", part[2]);
  int h = open_rank(0, "");
  length = ab_rendezvous(h, part, sizeof part);
  if (length <= (int)sizeof part || part[7] != 0) fail(__LINE__, h, "a cut rendezvous", length);
  OK(h, ab_shutdown(h, NULL));
}

static void check_fork(void) {
  int h = open_rank(0, ""), status;
  pid_t child = fork();
  if (child == 0) {
    alarm(20); /* ends a call that never returns */
    every_function_refuses(h, "forked");
    int other = 0;
    if (ab_version(NULL, 0) != AB_ERROR) _exit(3);
    REFUSED(0, "forked", ab_open("{\"rank\": 0, \"world\": 2}", &other));
    _exit(0);
  }
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) fail(__LINE__, h, "the child's status", status);
  OK(h, ab_check(h, NULL)); /* the parent goes on */
  OK(h, ab_shutdown(h, NULL));
}

static int entries(const char *folder) {
  char command[200];
  int n = -1;
  snprintf(command, sizeof command, "ls %s | wc -l", folder);
  FILE *pipe = popen(command, "r");
  if (!pipe || fscanf(pipe, "%d", &n) != 1) exit(2);
  pclose(pipe);
  return n;
}

static void check_leaks(void) {
  char files[100], threads[100];
  snprintf(files, sizeof files, "/proc/%d/fd", getpid());
  snprintf(threads, sizeof threads, "/proc/%d/task", getpid());
  int files_before = 0, threads_before = 0;
  for (int i = 0; i < 120; i++) {
    if (i == 20) files_before = entries(files), threads_before = entries(threads);
    int h = open_rank(0, "");
    if (i % 2) OK(h, ab_join(h, NULL));
    OK(h, ab_shutdown(h, i % 3 ? NULL : "a reason"));
  }
  if (entries(files) > files_before) fail(__LINE__, 0, "descriptors more", entries(files) - files_before);
  if (entries(threads) > threads_before + 4) fail(__LINE__, 0, "threads more", entries(threads) - threads_before);
}

int main(int count, char **arguments) {
  static const struct {
    const char *name;
    void (*run)(void);
  } checks[] = {{"train", check_train}, {"handles", check_handles}, {"nulls", check_nulls},
                {"texts", check_texts}, {"fork", check_fork},       {"leaks", check_leaks}};
  for (size_t i = 0; i < sizeof checks / sizeof *checks; i++)
    if (count == 2 && strcmp(arguments[1], checks[i].name) == 0) return checks[i].run(), 0;
  fprintf(stderr, "no such check\n");
  return 2;
}

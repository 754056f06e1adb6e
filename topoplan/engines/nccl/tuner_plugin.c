/* A tuner plug-in of NCCL for the versions 5, 6 and 7 of its interface. It needs no header of NCCL. The interface passes
 * the domains of NVLink and the constants of NCCL's model by address, and their sizes differ between versions: they are
 * neither read nor written here. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

typedef void (*Logger)(int level, unsigned long subsystems, const char *file, int line, const char *format, ...);
enum { LOG_INFO = 3, SUBSYSTEM_TUNING = 0x40 };

/* Algorithms: tree 0, ring 1, NVLS 4, NVLS tree 5, PAT 6. Protocols: LL 0, LL128 1, simple 2. */
typedef struct {
  int collective; /* broadcast 0, reduce 1, allgather 2, reducescatter 3, allreduce 4 */
  uint64_t first, last; /* bytes of the full buffer, both inside */
  int algorithm, protocol;
  int channels; /* 0 leaves the number to NCCL */
} Row;

@TABLE@

typedef struct {
  int applies; /* the communicator has RANKS ranks on SERVERS servers */
} Context;

static int start(void **context, uint64_t communicator, size_t ranks, size_t servers, Logger log, void *domains,
                 void *constants) {
  Context *made = malloc(sizeof *made);
  (void)communicator, (void)domains, (void)constants;
  if (made == NULL) return 2; /* ncclSystemError: NCCL continues without the plug-in */
  made->applies = ranks == RANKS && servers == SERVERS;
  *context = made;
  if (log != NULL)
    log(LOG_INFO, SUBSYSTEM_TUNING, __FILE__, __LINE__,
        made->applies ? "topoplan: chooses for %zu ranks on %zu servers"
                      : "topoplan: leaves %zu ranks on %zu servers to NCCL",
        ranks, servers);
  return 0;
}

/* A cost of 0 is the lowest. A negative cost marks a choice that NCCL does not have here; it stays, and NCCL chooses. */
static int choose(void *context, int collective, size_t bytes, int operations, float **costs, int algorithms,
                  int protocols, int registered, int *channels) {
  float *cost = (float *)costs; /* NCCL passes an array of algorithms x protocols by this type */
  (void)operations, (void)registered;
  if (context == NULL || !((Context *)context)->applies) return 0;
  for (size_t i = 0; i < sizeof ROWS / sizeof *ROWS; i++) {
    const Row *row = &ROWS[i];
    if (row->collective != collective || bytes < row->first || bytes > row->last) continue;
    if (row->algorithm >= algorithms || row->protocol >= protocols) return 0;
    cost += row->algorithm * protocols + row->protocol;
    if (*cost < 0) return 0;
    *cost = 0;
    if (row->channels > 0) *channels = row->channels;
    return 0;
  }
  return 0;
}

static int end(void *context) {
  free(context);
  return 0;
}

typedef struct {
  const char *name;
  int (*start)(void **, uint64_t, size_t, size_t, Logger, void *, void *);
  int (*choose)(void *, int, size_t, int, float **, int, int, int, int *);
  int (*end)(void *);
} Tuner5;

typedef struct {
  Tuner5 common;
  int (*chunk_size)(void *, int, size_t, int, int, int, size_t *); /* NULL leaves the size to NCCL */
} Tuner6;

const Tuner5 ncclTunerPlugin_v5 = {"topoplan", start, choose, end};
const Tuner6 ncclTunerPlugin_v6 = {{"topoplan", start, choose, end}, NULL};
const Tuner6 ncclTunerPlugin_v7 = {{"topoplan", start, choose, end}, NULL};

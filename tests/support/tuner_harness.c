/* Call a tuner plug-in as NCCL does, by the structs of versions 5, 6 and 7 of its interface (written from their recorded
 * fields): print their sizes, then algorithm, protocol and channels for each line "collective bytes" of the input. */
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALGORITHMS = 7, PROTOCOLS = 3, LINKS = 3, SCALES = 3 };

#define CONSTANTS(capabilities)                                                                  \
  struct {                                                                                       \
    double base[ALGORITHMS][PROTOCOLS], hardware[LINKS][ALGORITHMS][PROTOCOLS];                   \
    double ll[capabilities][SCALES], ring128[capabilities][SCALES], tree128[capabilities][SCALES]; \
    double tree[capabilities][SCALES], nvls_tree[capabilities][SCALES];                           \
  }

typedef CONSTANTS(4) Constants5;
typedef CONSTANTS(5) Constants7;
typedef struct { int domains, fewest, most; } Domains;
typedef void (*Logger)(int, unsigned long, const char *, int, const char *, ...);

#define TUNER(Constants)                                                                       \
  const char *name;                                                                            \
  int (*init)(void **, uint64_t, size_t, size_t, Logger, Domains *, Constants *);               \
  int (*choose)(void *, int, size_t, int, float **, int, int, int, int *);                      \
  int (*finalize)(void *);

typedef struct { TUNER(Constants5) } Tuner5;
typedef struct { TUNER(Constants5) int (*chunk)(void *, int, size_t, int, int, int, size_t *); } Tuner6;
typedef struct { TUNER(Constants7) int (*chunk)(void *, int, size_t, int, int, int, size_t *); } Tuner7;

static void report(int level, unsigned long flags, const char *file, int line, const char *format, ...) {
  va_list given;
  (void)file, (void)line;
  va_start(given, format);
  fprintf(stderr, "%d %lu ", level, flags);
  vfprintf(stderr, format, given);
  fputc('\n', stderr);
  va_end(given);
}

#define RUN(Tuner, Constants, tuner)                                                             \
  do {                                                                                           \
    Constants constants, before;                                                                 \
    Domains domains = {1, 8, 8};                                                                 \
    memset(&constants, 0x5a, sizeof constants);                                                  \
    before = constants;                                                                          \
    if (tuner->init(&context, 1, ranks, servers, report, &domains, &constants)) return 3;        \
    if (memcmp(&constants, &before, sizeof before)) return 4;                                    \
    choose = tuner->choose, finalize = tuner->finalize;                                          \
    printf("%s %zu %zu\n", tuner->name, sizeof(Tuner), sizeof(Constants));                        \
  } while (0)

int main(int count, char **given) {
  if (count != 6) return 1;
  void *library = dlopen(given[1], RTLD_NOW), *context = NULL;
  if (library == NULL) return fprintf(stderr, "%s\n", dlerror()), 2;
  const char *version = given[2];
  size_t ranks = strtoul(given[3], NULL, 10), servers = strtoul(given[4], NULL, 10);
  int missing = atoi(given[5]); /* of the 21 choices, one that NCCL does not have; -1 for none */
  int (*choose)(void *, int, size_t, int, float **, int, int, int, int *);
  int (*finalize)(void *);
  char symbol[32];
  snprintf(symbol, sizeof symbol, "ncclTunerPlugin_v%s", version);
  void *found = dlsym(library, symbol);
  if (found == NULL) return 5;
  if (*version == '5') RUN(Tuner5, Constants5, ((const Tuner5 *)found));
  else if (*version == '6') {
    if (((const Tuner6 *)found)->chunk != NULL) return 6;
    RUN(Tuner6, Constants5, ((const Tuner6 *)found));
  } else {
    if (((const Tuner7 *)found)->chunk != NULL) return 6;
    RUN(Tuner7, Constants7, ((const Tuner7 *)found));
  }
  int collective;
  unsigned long long bytes;
  while (scanf("%d %llu", &collective, &bytes) == 2) {
    float table[ALGORITHMS][PROTOCOLS];
    int channels = 0, best = 0;
    for (int i = 0; i < ALGORITHMS * PROTOCOLS; i++) (&table[0][0])[i] = i == missing ? -1.0f : 10.0f + i;
    if (choose(context, collective, bytes, 1, (float **)table, ALGORITHMS, PROTOCOLS, 0, &channels)) return 7;
    for (int i = 0; i < ALGORITHMS * PROTOCOLS; i++) {
      float cost = (&table[0][0])[i], least = (&table[0][0])[best];
      if ((i == missing) != (cost < 0)) return 8;
      if (cost >= 0 && (least < 0 || cost < least)) best = i;
    }
    printf("%d %d %d %g\n", best / PROTOCOLS, best % PROTOCOLS, channels, (&table[0][0])[best]);
  }
  return finalize(context) ? 9 : 0;
}

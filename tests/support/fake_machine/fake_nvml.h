/* What the files of the fake NVML share: the machine as its text file describes it, and the rules for refusals. */
#ifndef FAKE_NVML_H
#define FAKE_NVML_H

#include <stddef.h>

#define PUBLIC __attribute__((visibility("default")))

enum { MAX_GPUS = 32, MAX_LINKS = 36, MAX_FIELDS = 160, MAX_MIGS = 8, MAX_RULES = 1024, P2P_INDICES = 5 };

/* nvmlReturn_t, as far as it is used here. */
enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    VERSION_MISMATCH = 25,
    UNKNOWN = 999
};

typedef int answer; /* nvmlReturn_t */

/* nvmlPciInfo_t, which is also version 3 of it. */
typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_id, pci_subsystem;
    char bus_id[32];
} pci_info;

typedef struct {
    unsigned active, version, remote_type;
    unsigned capabilities[6];
    char remote[32]; /* bus id of the far end as NVML writes it; empty: not known */
} link_end;

typedef struct {
    unsigned id;
    int scope; /* -1: any */
    unsigned type;
    answer code;
    unsigned long long value;
} field;

typedef struct {
    char uuid[96], name[96];
    int gpu;
} mig_device;

typedef struct {
    int index;
    char name[96], uuid[96], bus[32];
    unsigned pci_id, pci_subsystem;
    int minor, major_capability, minor_capability;
    int pcie_max_generation, pcie_max_width, pcie_generation, pcie_width; /* -1: NotSupported */
    int pstate, numa, near_node;                                          /* -1: NotSupported */
    unsigned long long affinity[16];
    int mig_current, mig_pending, mig_max; /* current -1: NotSupported */
    mig_device migs[MAX_MIGS];
    int mig_count;
    int c2c; /* -1: NotSupported */
    link_end links[MAX_LINKS];
    int link_count;
    field fields[MAX_FIELDS];
    int field_count;
    unsigned fabric_state, fabric_status, fabric_clique, fabric_health, fabric_summary;
    unsigned char fabric_cluster[16];
} gpu_device;

typedef struct {
    char driver[80], nvml[80];
    int cuda;
    gpu_device gpus[MAX_GPUS];
    int gpu_count;
    unsigned char p2p[MAX_GPUS][MAX_GPUS][P2P_INDICES];
    int ancestor[MAX_GPUS][MAX_GPUS];
} machine_text;

extern machine_text machine;
extern int initialised;

answer read_machine(void);
answer refusal(const char *function, int gpu, int link);
answer bus_numbers(const char *text, unsigned *domain, unsigned *bus, unsigned *device);
void fill_pci(pci_info *info, const char *bus_id);
answer copy_text(char *to, unsigned size, const char *text);

/* The GPU behind a handle; NULL for a MIG instance and for anything that is no handle. */
gpu_device *gpu_of(const void *handle);
mig_device *mig_of(const void *handle);

/* First thing in every function: not before nvmlInit, and not where a rule of the text file refuses. */
#define ENTER(gpu, link)                                            \
    do {                                                            \
        answer code_ = refusal(__func__, (gpu), (link));            \
        if (!initialised) return UNINITIALIZED;                     \
        if (code_) return code_;                                    \
    } while (0)

#define WITH_GPU(handle, link)                                                            \
    gpu_device *gpu = gpu_of(handle);                                                     \
    ENTER(gpu ? gpu->index : mig_of(handle) ? mig_of(handle)->gpu : -1, (link));          \
    if (!gpu) return INVALID_ARGUMENT

#endif

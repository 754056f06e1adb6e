/* NVML's session, the list of devices, and what each one is: name, ids, PCIe link, place in the machine. */
#include <stdio.h>
#include <string.h>

#include "fake_nvml.h"

/* nvmlPciInfo_v2_t: only the short bus id. */
typedef struct {
    char bus_id[16];
    unsigned domain, bus, device, pci_id, pci_subsystem, reserved[4];
} pci_info_v2;

int initialised;

gpu_device *gpu_of(const void *handle) {
    for (int i = 0; i < machine.gpu_count; i++)
        if (handle == &machine.gpus[i]) return &machine.gpus[i];
    return NULL;
}

mig_device *mig_of(const void *handle) {
    for (int i = 0; i < machine.gpu_count; i++)
        for (int j = 0; j < machine.gpus[i].mig_count; j++)
            if (handle == &machine.gpus[i].migs[j]) return &machine.gpus[i].migs[j];
    return NULL;
}

answer copy_text(char *to, unsigned size, const char *text) {
    if (strlen(text) >= size) return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return SUCCESS;
}

answer bus_numbers(const char *text, unsigned *domain, unsigned *bus, unsigned *device) {
    return text && sscanf(text, "%x:%x:%x", domain, bus, device) == 3 ? SUCCESS : INVALID_ARGUMENT;
}

/* The text as it stands, and the numbers in it: a far end that is not visible has text such as FFFFFFF:FFFF:FF.0. */
void fill_pci(pci_info *info, const char *bus_id) {
    memset(info, 0, sizeof *info);
    bus_numbers(bus_id, &info->domain, &info->bus, &info->device);
    snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, "%04X:%02X:%02X.0", info->domain & 0xFFFF,
             info->bus & 0xFF, info->device & 0xFF);
    snprintf(info->bus_id, sizeof info->bus_id, "%s", bus_id);
}

PUBLIC answer nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    answer code = read_machine();
    if (!code) code = refusal(__func__, -1, -1);
    if (!code) initialised++;
    return code;
}

/* Only the fake has it: by this a test tells it from NVIDIA's library. */
PUBLIC const int fakeNvml = 1;

PUBLIC answer nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

PUBLIC answer nvmlShutdown(void) {
    ENTER(-1, -1);
    initialised--;
    return SUCCESS;
}

PUBLIC const char *nvmlErrorString(answer code) {
    switch (code) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case VERSION_MISMATCH: return "Argument Version Mismatch";
    default: return "Unknown Error";
    }
}

PUBLIC answer nvmlSystemGetDriverVersion(char *version, unsigned length) {
    ENTER(-1, -1);
    return copy_text(version, length, machine.driver);
}

PUBLIC answer nvmlSystemGetNVMLVersion(char *version, unsigned length) {
    ENTER(-1, -1);
    return copy_text(version, length, machine.nvml);
}

PUBLIC answer nvmlSystemGetCudaDriverVersion(int *version) {
    ENTER(-1, -1);
    *version = machine.cuda;
    return SUCCESS;
}

PUBLIC answer nvmlDeviceGetCount_v2(unsigned *count) {
    ENTER(-1, -1);
    *count = (unsigned)machine.gpu_count;
    return SUCCESS;
}

PUBLIC answer nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    ENTER((int)index, -1);
    if (index >= (unsigned)machine.gpu_count) return INVALID_ARGUMENT;
    *handle = &machine.gpus[index];
    return SUCCESS;
}

PUBLIC answer nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    ENTER(-1, -1);
    for (int i = 0; i < machine.gpu_count; i++) {
        gpu_device *gpu = &machine.gpus[i];
        if (!strcmp(gpu->uuid, uuid)) return *handle = gpu, SUCCESS;
        for (int j = 0; j < gpu->mig_count; j++)
            if (!strcmp(gpu->migs[j].uuid, uuid)) return *handle = &gpu->migs[j], SUCCESS;
    }
    return NOT_FOUND;
}

PUBLIC answer nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **handle) {
    unsigned wanted[3], have[3];
    ENTER(-1, -1);
    if (bus_numbers(text, wanted, wanted + 1, wanted + 2)) return INVALID_ARGUMENT;
    for (int i = 0; i < machine.gpu_count; i++) {
        bus_numbers(machine.gpus[i].bus, have, have + 1, have + 2);
        if (!memcmp(wanted, have, sizeof have)) return *handle = &machine.gpus[i], SUCCESS;
    }
    return NOT_FOUND;
}

PUBLIC answer nvmlDeviceGetIndex(void *handle, unsigned *index) {
    WITH_GPU(handle, -1);
    *index = (unsigned)gpu->index;
    return SUCCESS;
}

PUBLIC answer nvmlDeviceGetName(void *handle, char *name, unsigned length) {
    mig_device *mig = mig_of(handle);
    if (mig && initialised) return copy_text(name, length, mig->name);
    WITH_GPU(handle, -1);
    return copy_text(name, length, gpu->name);
}

PUBLIC answer nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length) {
    mig_device *mig = mig_of(handle);
    if (mig && initialised) return copy_text(uuid, length, mig->uuid);
    WITH_GPU(handle, -1);
    return copy_text(uuid, length, gpu->uuid);
}

PUBLIC answer nvmlDeviceGetPciInfo_v3(void *handle, pci_info *info) {
    WITH_GPU(handle, -1);
    fill_pci(info, gpu->bus);
    info->pci_id = gpu->pci_id;
    info->pci_subsystem = gpu->pci_subsystem;
    return SUCCESS;
}

PUBLIC answer nvmlDeviceGetPciInfo_v2(void *handle, pci_info_v2 *info) {
    WITH_GPU(handle, -1);
    pci_info now;
    fill_pci(&now, gpu->bus);
    memset(info, 0, sizeof *info);
    memcpy(info->bus_id, now.bus_id_legacy, sizeof info->bus_id);
    info->domain = now.domain;
    info->bus = now.bus;
    info->device = now.device;
    info->pci_id = gpu->pci_id;
    info->pci_subsystem = gpu->pci_subsystem;
    return SUCCESS;
}

PUBLIC answer nvmlDeviceGetMinorNumber(void *handle, unsigned *minor) {
    WITH_GPU(handle, -1);
    *minor = (unsigned)gpu->minor;
    return SUCCESS;
}

PUBLIC answer nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    WITH_GPU(handle, -1);
    *major = gpu->major_capability;
    *minor = gpu->minor_capability;
    return SUCCESS;
}

/* A number that -1 hides. */
#define NUMBER(function, member)                                                \
    PUBLIC answer function(void *handle, unsigned *value) {                     \
        WITH_GPU(handle, -1);                                                   \
        if (gpu->member < 0) return NOT_SUPPORTED;                              \
        *value = (unsigned)gpu->member;                                         \
        return SUCCESS;                                                         \
    }

NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, pcie_generation)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, pcie_width)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, pcie_max_generation)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, pcie_max_width)
NUMBER(nvmlDeviceGetPerformanceState, pstate)

PUBLIC answer nvmlDeviceGetCpuAffinity(void *handle, unsigned words, unsigned long *set) {
    WITH_GPU(handle, -1);
    for (unsigned i = 0; i < words; i++) set[i] = i < 16 ? (unsigned long)gpu->affinity[i] : 0;
    return SUCCESS;
}

PUBLIC answer nvmlDeviceGetTopologyCommonAncestor(void *first, void *second, int *level) {
    WITH_GPU(first, -1);
    gpu_device *other = gpu_of(second);
    if (!other) return INVALID_ARGUMENT;
    *level = machine.ancestor[gpu->index][other->index];
    return SUCCESS;
}

PUBLIC answer nvmlDeviceGetP2PStatus(void *first, void *second, int index, unsigned *status) {
    WITH_GPU(first, -1);
    gpu_device *other = gpu_of(second);
    if (!other || index < 0 || index >= P2P_INDICES) return INVALID_ARGUMENT;
    /* Of a GPU and itself NCCL asks too, and gives up if that is an error. */
    *status = other == gpu ? 0 : machine.p2p[gpu->index][other->index][index];
    return SUCCESS;
}

/* Functions that drivers before 450 lack: built with -DFAKE_NVML_OLD_DRIVER, so does this library. */
#include <string.h>

#include "fake_nvml.h"

#ifndef FAKE_NVML_OLD_DRIVER

typedef struct {
    unsigned char cluster[16];
    answer status;
    unsigned clique, state;
} fabric_info;

typedef struct {
    unsigned version;
    unsigned char cluster[16];
    answer status;
    unsigned clique, state, health;
    unsigned char summary; /* from version 3 on */
} fabric_info_v;

enum { FABRIC_V2 = 0x02000024, FABRIC_V3 = 0x03000028 };

PUBLIC answer nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned number, unsigned *type) {
    WITH_GPU(handle, (int)number);
    if (number >= (gpu->link_count ? (unsigned)gpu->link_count : MAX_LINKS)) return INVALID_ARGUMENT;
    if (!gpu->link_count || !gpu->links[number].active) return NOT_SUPPORTED;
    *type = gpu->links[number].remote_type;
    return SUCCESS;
}

PUBLIC answer nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    WITH_GPU(handle, -1);
    if (gpu->mig_current < 0) return NOT_SUPPORTED;
    *current = (unsigned)gpu->mig_current;
    *pending = (unsigned)gpu->mig_pending;
    return SUCCESS;
}

PUBLIC answer nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) {
    WITH_GPU(handle, -1);
    *count = (unsigned)gpu->mig_max;
    return SUCCESS;
}

PUBLIC answer nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **instance) {
    WITH_GPU(handle, -1);
    if (gpu->mig_current < 0) return NOT_SUPPORTED;
    if (index >= (unsigned)gpu->mig_max) return INVALID_ARGUMENT;
    if (index >= (unsigned)gpu->mig_count) return NOT_FOUND;
    *instance = &gpu->migs[index];
    return SUCCESS;
}

PUBLIC answer nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *handle, void **parent) {
    mig_device *mig = mig_of(handle);
    ENTER(mig ? mig->gpu : -1, -1);
    if (!mig) return INVALID_ARGUMENT;
    *parent = &machine.gpus[mig->gpu];
    return SUCCESS;
}

PUBLIC answer nvmlDeviceIsMigDeviceHandle(void *handle, unsigned *is_instance) {
    mig_device *mig = mig_of(handle);
    ENTER(mig ? mig->gpu : -1, -1);
    if (!mig && !gpu_of(handle)) return INVALID_ARGUMENT;
    *is_instance = mig != NULL;
    return SUCCESS;
}

PUBLIC answer nvmlDeviceGetGpuFabricInfo(void *handle, fabric_info *info) {
    WITH_GPU(handle, -1);
    memcpy(info->cluster, gpu->fabric_cluster, sizeof info->cluster);
    info->status = (answer)gpu->fabric_status;
    info->clique = gpu->fabric_clique;
    info->state = gpu->fabric_state;
    return SUCCESS;
}

PUBLIC answer nvmlDeviceGetGpuFabricInfoV(void *handle, fabric_info_v *info) {
    WITH_GPU(handle, -1);
    if (info->version != FABRIC_V2 && info->version != FABRIC_V3) return VERSION_MISMATCH;
    memcpy(info->cluster, gpu->fabric_cluster, sizeof info->cluster);
    info->status = (answer)gpu->fabric_status;
    info->clique = gpu->fabric_clique;
    info->state = gpu->fabric_state;
    info->health = gpu->fabric_health;
    if (info->version == FABRIC_V3) info->summary = (unsigned char)gpu->fabric_summary;
    return SUCCESS;
}

PUBLIC answer nvmlDeviceGetC2cModeInfoV(void *handle, unsigned *enabled) {
    WITH_GPU(handle, -1);
    if (gpu->c2c < 0) return NOT_SUPPORTED;
    *enabled = (unsigned)gpu->c2c;
    return SUCCESS;
}

PUBLIC answer nvmlDeviceGetNumaNodeId(void *handle, int *node) {
    WITH_GPU(handle, -1);
    if (gpu->numa < 0) return NOT_SUPPORTED;
    *node = gpu->numa;
    return SUCCESS;
}

PUBLIC answer nvmlDeviceGetMemoryAffinity(void *handle, unsigned words, unsigned long *set, unsigned scope) {
    WITH_GPU(handle, -1);
    if (scope > 1) return INVALID_ARGUMENT;
    if (gpu->near_node < 0) return NOT_SUPPORTED;
    if (words <= (unsigned)gpu->near_node / 64) return INSUFFICIENT_SIZE;
    memset(set, 0, words * sizeof *set);
    set[gpu->near_node / 64] = 1UL << gpu->near_node % 64;
    return SUCCESS;
}

#endif

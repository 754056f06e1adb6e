/* NVLinks one by one, and the numbered field values. */
#include <string.h>
#include <time.h>

#include "fake_nvml.h"

enum { FIELD_END = 308 }; /* NVML_FI_MAX of the driver that this follows */

typedef union {
    double d;
    unsigned u;
    unsigned long ul;
    unsigned long long ull;
    long long ll;
    int i;
    unsigned short us;
} value;

typedef struct {
    unsigned id, scope;
    long long timestamp, latency;
    unsigned type;
    answer code;
    value value;
} field_value;

/* A GPU without NVLink supports none of this; one that has some calls the link after its last an invalid argument. */
#define WITH_LINK(handle, number)                                                              \
    WITH_GPU(handle, (int)(number));                                                           \
    if ((number) >= (gpu->link_count ? (unsigned)gpu->link_count : MAX_LINKS)) return INVALID_ARGUMENT; \
    if (!gpu->link_count) return NOT_SUPPORTED;                                                \
    link_end *link = &gpu->links[number]

PUBLIC answer nvmlDeviceGetNvLinkState(void *handle, unsigned number, unsigned *active) {
    WITH_LINK(handle, number);
    *active = link->active;
    return SUCCESS;
}

PUBLIC answer nvmlDeviceGetNvLinkVersion(void *handle, unsigned number, unsigned *version) {
    WITH_LINK(handle, number);
    *version = link->version;
    return SUCCESS;
}

PUBLIC answer nvmlDeviceGetNvLinkCapability(void *handle, unsigned number, unsigned capability, unsigned *result) {
    WITH_LINK(handle, number);
    if (capability >= 6) return INVALID_ARGUMENT;
    *result = link->capabilities[capability];
    return SUCCESS;
}

/* Of a link that is down nothing is known but that it is there. */
PUBLIC answer nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned number, pci_info *info) {
    WITH_LINK(handle, number);
    if (!link->active) return NOT_SUPPORTED;
    fill_pci(info, link->remote);
    for (int i = 0; i < machine.gpu_count; i++)
        if (!strcmp(machine.gpus[i].bus, link->remote)) info->pci_id = machine.gpus[i].pci_id;
    return SUCCESS;
}

static const field *find_field(const gpu_device *gpu, unsigned id, unsigned scope) {
    for (int i = 0; i < gpu->field_count; i++) {
        const field *f = &gpu->fields[i];
        if (f->id == id && (f->scope < 0 || (unsigned)f->scope == scope)) return f;
    }
    return NULL;
}

PUBLIC answer nvmlDeviceGetFieldValues(void *handle, int count, field_value *values) {
    WITH_GPU(handle, -1);
    if (count < 1 || !values) return INVALID_ARGUMENT;
    for (int i = 0; i < count; i++) {
        field_value *v = &values[i];
        const field *f = find_field(gpu, v->id, v->scope);
        memset(&v->value, 0, sizeof v->value);
        v->timestamp = (long long)time(NULL) * 1000000;
        v->latency = 1;
        v->type = f ? f->type : 1;
        v->code = f ? f->code : v->id && v->id < FIELD_END ? NOT_SUPPORTED : INVALID_ARGUMENT;
        if (!f || f->code) continue;
        switch (f->type) {
        case 0: v->value.d = (double)f->value; break;
        case 1: v->value.u = (unsigned)f->value; break;
        case 5: v->value.i = (int)f->value; break;
        case 6: v->value.us = (unsigned short)f->value; break;
        default: v->value.ull = f->value;
        }
    }
    return SUCCESS;
}

//go:build cgo

// The functions of penstock.h. Each first compares this process with the process that
// loaded the library. Go's threads do not exist in a forked child, so a call into Go would
// wait for ever there.

#include <stdio.h>
#include <unistd.h>

#include "_cgo_export.h"
#include "penstock.h"

// owner is the process that loaded the library. It is set before the first call.
static pid_t owner;

__attribute__((constructor)) static void loaded(void) { owner = getpid(); }

static int32_t forked(penstock_error *error) {
	if (error != NULL) {
		error->code = PENSTOCK_ERR_FORKED;
		snprintf(error->message, sizeof error->message,
			"process %ld loaded libpenstock, and process %ld was forked from it: load the library after the fork, or start the child as a new program",
			(long)owner, (long)getpid());
	}
	return PENSTOCK_ERR_FORKED;
}

#define IN_OWNER(error)            \
	do {                           \
		if (getpid() != owner)     \
			return forked(error);  \
	} while (0)

uint32_t penstock_abi_version(void) { return PENSTOCK_ABI_VERSION; }

int32_t penstock_open(const penstock_options *options, penstock_store *store, penstock_error *error) {
	IN_OWNER(error);
	return goOpen((penstock_options *)options, store, error);
}

int32_t penstock_close(penstock_store store, penstock_error *error) {
	IN_OWNER(error);
	return goClose(store, error);
}

int32_t penstock_ensure(penstock_store store, const penstock_definition *definition, penstock_namespace *ns, penstock_error *error) {
	IN_OWNER(error);
	return goEnsure(store, (penstock_definition *)definition, ns, error);
}

int32_t penstock_epoch(penstock_namespace ns, uint32_t refresh, uint64_t *epoch, penstock_error *error) {
	IN_OWNER(error);
	return goEpoch(ns, refresh, epoch, error);
}

int32_t penstock_bump(penstock_namespace ns, uint64_t to, uint64_t *epoch, penstock_error *error) {
	IN_OWNER(error);
	return goBumpKeep(ns, to, 1, epoch, error);
}

int32_t penstock_bump_keep(penstock_namespace ns, uint64_t to, uint32_t keep, uint64_t *epoch, penstock_error *error) {
	IN_OWNER(error);
	return goBumpKeep(ns, to, keep, epoch, error);
}

int32_t penstock_pin_epoch(penstock_namespace ns, uint64_t epoch, uint32_t ms, uint64_t *pinned, penstock_lease *lease, penstock_error *error) {
	IN_OWNER(error);
	return goPinEpoch(ns, epoch, ms, pinned, lease, error);
}

int32_t penstock_retire(penstock_namespace ns, uint64_t epoch, uint32_t force, penstock_error *error) {
	IN_OWNER(error);
	return goRetire(ns, epoch, force, error);
}

int32_t penstock_register(penstock_store store, void *addr, uint64_t n, penstock_memory *memory, penstock_error *error) {
	IN_OWNER(error);
	return goRegister(store, (uint64_t)(uintptr_t)addr, n, memory, error);
}

int32_t penstock_register_device(penstock_store store, const penstock_device_options *options, uint64_t address, uint64_t n, penstock_memory *memory, penstock_error *error) {
	IN_OWNER(error);
	return goRegisterDevice(store, (penstock_device_options *)options, address, n, memory, error);
}

int32_t penstock_copy_device(uint32_t device, uint64_t address, void *host, uint64_t n, uint32_t to_device, penstock_error *error) {
	IN_OWNER(error);
	return goCopyDevice(device, address, (uint64_t)(uintptr_t)host, n, to_device, error);
}

int32_t penstock_unregister(penstock_memory memory, penstock_error *error) {
	IN_OWNER(error);
	return goUnregister(memory, error);
}

static int32_t run(penstock_namespace ns, uint32_t op, const penstock_batch *batch, uint8_t *results, penstock_result *out) {
	IN_OWNER(out == NULL ? NULL : &out->error);
	return goRun(ns, op, (penstock_batch *)batch, results, out);
}

int32_t penstock_match(penstock_namespace ns, const penstock_batch *batch, penstock_result *out) {
	return run(ns, PENSTOCK_OP_MATCH, batch, NULL, out);
}

int32_t penstock_get(penstock_namespace ns, const penstock_batch *batch, uint8_t *results, penstock_result *out) {
	return run(ns, PENSTOCK_OP_GET, batch, results, out);
}

int32_t penstock_put(penstock_namespace ns, const penstock_batch *batch, uint8_t *results, penstock_result *out) {
	return run(ns, PENSTOCK_OP_PUT, batch, results, out);
}

int32_t penstock_exists(penstock_namespace ns, const penstock_batch *batch, uint8_t *results, penstock_result *out) {
	return run(ns, PENSTOCK_OP_EXISTS, batch, results, out);
}

int32_t penstock_touch(penstock_namespace ns, const penstock_batch *batch, uint8_t *results, penstock_result *out) {
	return run(ns, PENSTOCK_OP_TOUCH, batch, results, out);
}

int32_t penstock_delete(penstock_namespace ns, const penstock_batch *batch, uint8_t *results, penstock_result *out) {
	return run(ns, PENSTOCK_OP_DELETE, batch, results, out);
}

int32_t penstock_submit(penstock_namespace ns, uint32_t op, const penstock_batch *batch, uint8_t *results, penstock_job *job, penstock_error *error) {
	IN_OWNER(error);
	return goSubmit(ns, op, (penstock_batch *)batch, results, job, error);
}

int32_t penstock_submit_wait(penstock_namespace ns, uint32_t op, const penstock_batch *batch, uint8_t *results, uint32_t timeout_ms, penstock_job *job, penstock_result *out, penstock_error *error) {
	if (job != NULL) *job = 0;
	IN_OWNER(error);
	return goSubmitWait(ns, op, (penstock_batch *)batch, results, timeout_ms, job, out, error);
}

int32_t penstock_cancel(penstock_store store, penstock_job job, penstock_error *error) {
	IN_OWNER(error);
	return goCancel(store, job, error);
}

int32_t penstock_eventfd(penstock_store store, int32_t *fd, penstock_error *error) {
	IN_OWNER(error);
	return goEventfd(store, fd, error);
}

int32_t penstock_drain(penstock_store store, penstock_result *completions, uint32_t max, uint32_t *n, penstock_error *error) {
	IN_OWNER(error);
	return goDrain(store, completions, max, n, error);
}

int32_t penstock_wait(penstock_store store, penstock_job job, uint32_t timeout_ms, penstock_result *out, penstock_error *error) {
	IN_OWNER(error);
	return goWait(store, job, timeout_ms, out, error);
}

int32_t penstock_lease_renew(penstock_lease lease, uint32_t ms, penstock_error *error) {
	IN_OWNER(error);
	return goLeaseRenew(lease, ms, error);
}

int32_t penstock_lease_release(penstock_lease lease, penstock_error *error) {
	IN_OWNER(error);
	return goLeaseRelease(lease, error);
}

int32_t penstock_key_ids(penstock_namespace ns, const void *keys, const uint32_t *key_offsets, uint32_t n, uint8_t *ids, penstock_error *error) {
	IN_OWNER(error);
	return goKeyIDs(ns, (void *)keys, (uint32_t *)key_offsets, n, ids, error);
}

int32_t penstock_chain(penstock_namespace ns, const uint8_t *parent, const void *extra, uint32_t extra_bytes, const uint32_t *tokens, uint32_t n_tokens, uint8_t *ids, uint32_t *n_ids, penstock_error *error) {
	IN_OWNER(error);
	return goChain(ns, (uint8_t *)parent, (void *)extra, extra_bytes, (uint32_t *)tokens, n_tokens, ids, n_ids, error);
}

int32_t penstock_stats(penstock_store store, char *buf, uint64_t cap, uint64_t *need, penstock_error *error) {
	IN_OWNER(error);
	return goStats(store, buf, cap, need, error);
}

int32_t penstock_leader_open(penstock_namespace ns, const penstock_leader_options *options, penstock_leader *leader, penstock_error *error) {
	IN_OWNER(error);
	return goLeaderOpen(ns, (penstock_leader_options *)options, leader, error);
}

int32_t penstock_leader_close(penstock_leader leader, penstock_error *error) {
	IN_OWNER(error);
	return goLeaderClose(leader, error);
}

int32_t penstock_leader_add(penstock_leader leader, const penstock_member *member, penstock_error *error) {
	IN_OWNER(error);
	return goLeaderAdd(leader, (penstock_member *)member, error);
}

int32_t penstock_leader_remove(penstock_leader leader, const char *name, penstock_error *error) {
	IN_OWNER(error);
	return goLeaderRemove(leader, (char *)name, error);
}

int32_t penstock_leader_report_nics(penstock_leader leader, const char *engine, const penstock_nic *nics, uint32_t n, penstock_error *error) {
	IN_OWNER(error);
	return goLeaderReportNICs(leader, (char *)engine, (penstock_nic *)nics, n, error);
}

int32_t penstock_leader_eventfd(penstock_leader leader, int32_t *fd, penstock_error *error) {
	IN_OWNER(error);
	return goLeaderEventfd(leader, fd, error);
}

int32_t penstock_leader_drain(penstock_leader leader, penstock_action *actions, uint32_t max, uint32_t *n, penstock_error *error) {
	IN_OWNER(error);
	return goLeaderDrain(leader, actions, max, n, error);
}

int32_t penstock_attempt_describe(penstock_attempt attempt, penstock_start *buf, uint64_t cap, uint64_t *need, penstock_error *error) {
	IN_OWNER(error);
	return goAttemptDescribe(attempt, buf, cap, need, error);
}

int32_t penstock_attempt_progress(penstock_attempt attempt, penstock_part part, uint32_t upto, uint64_t bytes, penstock_error *error) {
	IN_OWNER(error);
	return goAttemptProgress(attempt, part.from, part.to, upto, bytes, error);
}

int32_t penstock_attempt_stopped(penstock_attempt attempt, penstock_part part, uint32_t upto, uint32_t gone, penstock_error *error) {
	IN_OWNER(error);
	return goAttemptStopped(attempt, part.from, part.to, upto, gone, error);
}

int32_t penstock_attempt_passed(penstock_attempt attempt, penstock_error *error) {
	IN_OWNER(error);
	return goAttemptPassed(attempt, error);
}

int32_t penstock_attempt_done(penstock_attempt attempt, const char *failure, uint32_t intact, penstock_error *error) {
	IN_OWNER(error);
	return goAttemptDone(attempt, (char *)failure, intact, error);
}

int32_t penstock_gateway_open(penstock_namespace ns, const penstock_gateway_options *options, penstock_gateway *gateway, penstock_error *error) {
	IN_OWNER(error);
	return goGatewayOpen(ns, (penstock_gateway_options *)options, gateway, error);
}

int32_t penstock_gateway_close(penstock_gateway gateway, penstock_error *error) {
	IN_OWNER(error);
	return goGatewayClose(gateway, error);
}

int32_t penstock_gateway_submit(penstock_gateway gateway, const penstock_prompt *prompt, penstock_request *request, penstock_error *error) {
	IN_OWNER(error);
	return goGatewaySubmit(gateway, (penstock_prompt *)prompt, request, error);
}

int32_t penstock_request_cancel(penstock_request request, penstock_error *error) {
	IN_OWNER(error);
	return goRequestCancel(request, error);
}

int32_t penstock_gateway_eventfd(penstock_gateway gateway, int32_t *fd, penstock_error *error) {
	IN_OWNER(error);
	return goGatewayEventfd(gateway, fd, error);
}

int32_t penstock_gateway_drain(penstock_gateway gateway, penstock_event *events, uint32_t max, uint32_t *n, penstock_error *error) {
	IN_OWNER(error);
	return goGatewayDrain(gateway, events, max, n, error);
}

int32_t penstock_traffic_open(penstock_namespace ns, const penstock_traffic_options *options, penstock_traffic *traffic, penstock_error *error) {
	IN_OWNER(error);
	return goTrafficOpen(ns, (penstock_traffic_options *)options, traffic, error);
}

int32_t penstock_traffic_close(penstock_traffic traffic, penstock_error *error) {
	IN_OWNER(error);
	return goTrafficClose(traffic, error);
}

int32_t penstock_traffic_follow(penstock_traffic traffic, uint64_t stream, penstock_error *error) {
	IN_OWNER(error);
	return goTrafficFollow(traffic, stream, error);
}

int32_t penstock_traffic_describe(penstock_traffic traffic, penstock_traffic_description *description, penstock_error *error) {
	IN_OWNER(error);
	return goTrafficDescribe(traffic, description, error);
}

int32_t penstock_traffic_prefill(penstock_traffic traffic, const penstock_transfer_options *options, penstock_transfer *transfer, penstock_error *error) {
	IN_OWNER(error);
	return goTrafficPrefill(traffic, (penstock_transfer_options *)options, transfer, error);
}

int32_t penstock_traffic_decode(penstock_traffic traffic, const penstock_transfer_options *options, penstock_transfer *transfer, penstock_error *error) {
	IN_OWNER(error);
	return goTrafficDecode(traffic, (penstock_transfer_options *)options, transfer, error);
}

int32_t penstock_transfer_read(penstock_transfer transfer, penstock_part part, penstock_error *error) {
	IN_OWNER(error);
	return goTransferRead(transfer, part.from, part.to, error);
}

int32_t penstock_transfer_cut(penstock_transfer transfer, penstock_error *error) {
	IN_OWNER(error);
	return goTransferCut(transfer, error);
}

int32_t penstock_transfer_recompute(penstock_transfer transfer, penstock_part part, penstock_error *error) {
	IN_OWNER(error);
	return goTransferRecompute(transfer, part.from, part.to, error);
}

int32_t penstock_transfer_add_pages(penstock_transfer transfer, const uint32_t *pages, uint32_t n_pages, penstock_error *error) {
	IN_OWNER(error);
	return goTransferAddPages(transfer, (uint32_t *)pages, n_pages, error);
}

int32_t penstock_transfer_computed(penstock_transfer transfer, uint32_t layer, uint32_t block, penstock_error *error) {
	IN_OWNER(error);
	return goTransferComputed(transfer, layer, block, error);
}

int32_t penstock_transfer_layer(penstock_transfer transfer, uint32_t layer, uint32_t timeout_ms, penstock_error *error) {
	IN_OWNER(error);
	return goTransferLayer(transfer, layer, timeout_ms, error);
}

int32_t penstock_transfer_finish(penstock_transfer transfer, penstock_error *error) {
	IN_OWNER(error);
	return goTransferFinish(transfer, error);
}

int32_t penstock_transfer_cancel(penstock_transfer transfer, penstock_error *error) {
	IN_OWNER(error);
	return goTransferCancel(transfer, error);
}

int32_t penstock_traffic_append(penstock_traffic traffic, const char *request, const uint8_t *ids, uint32_t n_ids, uint64_t epoch, uint32_t page, uint32_t timeout_ms, penstock_error *error) {
	IN_OWNER(error);
	return goTrafficAppend(traffic, (char *)request, (uint8_t *)ids, n_ids, epoch, &page, 1, timeout_ms, error);
}

int32_t penstock_traffic_append_pages(penstock_traffic traffic, const char *request, const uint8_t *ids, uint32_t n_ids, uint64_t epoch, const uint32_t *pages, uint32_t n_pages, uint32_t timeout_ms, penstock_error *error) {
	IN_OWNER(error);
	return goTrafficAppend(traffic, (char *)request, (uint8_t *)ids, n_ids, epoch, (uint32_t *)pages, n_pages, timeout_ms, error);
}

int32_t penstock_traffic_settle(penstock_traffic traffic, const uint8_t *id, uint32_t timeout_ms, penstock_error *error) {
	IN_OWNER(error);
	return goTrafficSettle(traffic, (uint8_t *)id, timeout_ms, error);
}

int32_t penstock_traffic_nics(penstock_traffic traffic, penstock_nic *nics, uint32_t max, uint32_t *n, penstock_error *error) {
	IN_OWNER(error);
	return goTrafficNICs(traffic, nics, max, n, error);
}

int32_t penstock_traffic_eventfd(penstock_traffic traffic, int32_t *fd, penstock_error *error) {
	IN_OWNER(error);
	return goTrafficEventfd(traffic, fd, error);
}

int32_t penstock_traffic_drain(penstock_traffic traffic, penstock_transfer_event *events, uint32_t max, uint32_t *n, penstock_error *error) {
	IN_OWNER(error);
	return goTrafficDrain(traffic, events, max, n, error);
}

//go:build verbs && cgo && linux

#include "native.h"

#include <arpa/inet.h>
#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

static int64_t now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

struct pk_queue *pk_queue_new(struct ibv_qp *qp)
{
	struct pk_queue *q = calloc(1, sizeof *q);

	if (!q)
		return NULL;
	q->qp = qp;
	for (int i = 0; i < PK_POST_MAX; i++) {
		q->wr[i].sg_list = &q->sge[i];
		q->wr[i].next = i + 1 < PK_POST_MAX ? &q->wr[i + 1] : NULL;
	}
	return q;
}

struct pk_nic *pk_nic_new(void)
{
	struct pk_nic *nic = calloc(1, sizeof *nic);

	if (!nic)
		return NULL;
	for (int i = 0; i < PK_POLL_MAX; i++) {
		nic->refill[i].wr_id = PK_ID_IMM;
		nic->refill[i].next = i + 1 < PK_POLL_MAX ? &nic->refill[i + 1] : NULL;
	}
	return nic;
}

int pk_post(struct pk_queue *q, int n, int *err)
{
	struct ibv_send_wr *bad = NULL, *last = &q->wr[n - 1], *next = last->next;

	for (int i = 0; i < n; i++) {
		const struct pk_request *r = &q->req[i];
		struct ibv_send_wr *wr = &q->wr[i];

		wr->wr_id = r->id;
		wr->send_flags = r->signaled ? IBV_SEND_SIGNALED : 0;
		wr->num_sge = r->len ? 1 : 0;
		q->sge[i].addr = r->local;
		q->sge[i].length = r->len;
		q->sge[i].lkey = r->lkey;
		wr->wr.rdma.remote_addr = r->remote;
		wr->wr.rdma.rkey = r->rkey;
		switch (r->op) {
		case PK_WRITE_IMM:
			wr->opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
			wr->imm_data = htonl(r->imm);
			break;
		case PK_SEND:
			wr->opcode = IBV_WR_SEND;
			break;
		default:
			wr->opcode = IBV_WR_RDMA_WRITE;
		}
	}
	last->next = NULL;
	*err = ibv_post_send(q->qp, q->wr, &bad);
	last->next = next;
	if (*err == 0)
		return n;
	if (*err < 0)
		*err = -*err;
	return bad ? (int)(bad - q->wr) : 0;
}

int pk_refill(struct pk_nic *nic, int n)
{
	while (n > 0) {
		int k = n < PK_POLL_MAX ? n : PK_POLL_MAX;
		struct ibv_recv_wr *bad, *last = &nic->refill[k - 1], *next = last->next;
		int err;

		last->next = NULL;
		err = ibv_post_srq_recv(nic->imm, nic->refill, &bad);
		last->next = next;
		if (err)
			return err;
		n -= k;
	}
	return 0;
}

int pk_poll(struct pk_nic *nic)
{
	struct ibv_wc wc[PK_POLL_MAX];
	int used = 0, n = ibv_poll_cq(nic->cq, PK_POLL_MAX, wc);

	for (int i = 0; i < n; i++) {
		struct pk_completion *c = &nic->done[i];

		c->id = wc[i].wr_id;
		c->status = wc[i].status;
		c->qpn = wc[i].qp_num;
		c->vendor = wc[i].vendor_err;
		c->len = wc[i].byte_len;
		c->opcode = wc[i].wc_flags & IBV_WC_WITH_IMM && wc[i].opcode == IBV_WC_RECV ? PK_OP_SEND_IMM : wc[i].opcode;
		c->imm = ntohl(wc[i].imm_data);
		used += (c->id & PK_ID_IMM) != 0;
	}
	if (used && !nic->failed)
		nic->failed = pk_refill(nic, used);
	return n;
}

int pk_lend(struct pk_nic *nic, uint64_t id, uint64_t addr, uint32_t len, uint32_t lkey)
{
	struct ibv_sge sge = {.addr = addr, .length = len, .lkey = lkey};
	struct ibv_recv_wr wr = {.wr_id = id, .sg_list = &sge, .num_sge = 1}, *bad;

	return ibv_post_srq_recv(nic->msg, &wr, &bad);
}

int pk_arm(struct pk_nic *nic)
{
	return ibv_req_notify_cq(nic->cq, 0);
}

int pk_cq_events(struct pk_nic *nic)
{
	struct ibv_cq *cq;
	void *arg;
	int n = 0;

	while (ibv_get_cq_event(nic->channel, &cq, &arg) == 0)
		n++;
	if (n)
		ibv_ack_cq_events(nic->cq, n);
	return n;
}

int pk_async(struct pk_nic *nic, uint32_t *qpn)
{
	struct ibv_async_event e;
	int type;

	if (ibv_get_async_event(nic->ctx, &e))
		return -1;
	type = e.event_type;
	*qpn = 0;
	switch (type) {
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
	case IBV_EVENT_PATH_MIG_ERR:
		*qpn = e.element.qp->qp_num;
	}
	// The event is acknowledged last: until then its queue pair cannot be destroyed, so the access above is safe.
	ibv_ack_async_event(&e);
	return type;
}

int pk_port(struct ibv_context *ctx, uint8_t port, struct ibv_port_attr *attr)
{
	return ibv_query_port(ctx, port, attr);
}

struct ibv_mr *pk_reg(struct ibv_pd *pd, uint64_t addr, uint64_t len, int access)
{
	return ibv_reg_mr(pd, (void *)(uintptr_t)addr, len, access);
}

// bound waits at most wait_ms for the completion of request id on the bind queue pair. It returns as pk_bind does.
static int bound(struct pk_nic *nic, uint64_t id, int wait_ms)
{
	struct ibv_wc wc;
	int64_t end = now_ms() + wait_ms;

	for (int i = 0;; i++) {
		int n = ibv_poll_cq(nic->bind_cq, 1, &wc);

		if (n < 0)
			return EIO;
		if (n == 1 && wc.wr_id == id)
			return -(int)wc.status;
		if (i % 64 == 63) {
			if (now_ms() > end)
				return ETIMEDOUT;
			sched_yield();
		}
	}
}

int pk_bind(struct pk_nic *nic, struct ibv_mw *mw, struct ibv_mr *mr, uint64_t addr, uint64_t len, int wait_ms)
{
	struct ibv_mw_bind bind = {
		.wr_id = (uintptr_t)mw,
		.send_flags = IBV_SEND_SIGNALED,
		.bind_info = {.mr = mr, .addr = addr, .length = len, .mw_access_flags = IBV_ACCESS_REMOTE_WRITE},
	};
	int err = ibv_bind_mw(nic->bind, mw, &bind);

	if (err)
		return err < 0 ? -err : err;
	return bound(nic, bind.wr_id, wait_ms);
}

int pk_probe(struct pk_nic *nic, uint64_t src, uint32_t lkey, uint64_t dst, uint32_t rkey, uint32_t len, int wait_ms)
{
	struct ibv_sge sge = {.addr = src, .length = len, .lkey = lkey};
	struct ibv_send_wr wr = {
		.wr_id = 1,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = {.remote_addr = dst, .rkey = rkey},
	}, *bad;
	int err = ibv_post_send(nic->bind, &wr, &bad);

	if (err)
		return err < 0 ? -err : err;
	return bound(nic, wr.wr_id, wait_ms);
}

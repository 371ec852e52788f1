// What Go can't do with libibverbs by itself: call what is a macro, and do a batch in one call.
#ifndef PENSTOCK_VERBS_NATIVE_H
#define PENSTOCK_VERBS_NATIVE_H

#include <infiniband/verbs.h>
#include <stdint.h>

enum {
	PK_POST_MAX = 64,  // requests in one pk_post
	PK_POLL_MAX = 128, // completions in one pk_poll
};

// wr_id of receives: the top bits say of which queue; sends have neither.
#define PK_ID_IMM (1ULL << 63)
#define PK_ID_MSG (1ULL << 62)

// PK_OP_SEND_IMM is a message with an immediate, which libibverbs reports as a message with a flag.
enum { PK_OP_SEND_IMM = 1 << 30 };

enum { PK_WRITE = 1, PK_WRITE_IMM = 2, PK_SEND = 3 };

// pk_request is one request as Go fills it in.
struct pk_request {
	uint64_t id;
	uint64_t local, remote;
	uint32_t len, lkey, rkey, imm;
	uint32_t op, signaled;
};

// pk_queue is the sending side of one queue pair: the request batch, and the templates that it is copied into.
struct pk_queue {
	struct ibv_qp *qp;
	struct pk_request req[PK_POST_MAX];
	struct ibv_send_wr wr[PK_POST_MAX];
	struct ibv_sge sge[PK_POST_MAX];
};

// pk_completion is what Go reads of a completion.
struct pk_completion {
	uint64_t id;
	uint32_t status, imm, len, qpn, vendor, opcode;
};

// pk_nic is an open port and what all its endpoints share.
struct pk_nic {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_srq *imm, *msg;
	struct ibv_qp *bind;
	struct ibv_cq *bind_cq;
	int failed; // the errno of a refill that did not work, 0 if none
	struct ibv_recv_wr refill[PK_POLL_MAX];
	struct pk_completion done[PK_POLL_MAX];
};

struct pk_queue *pk_queue_new(struct ibv_qp *qp);
struct pk_nic *pk_nic_new(void);

// pk_post posts the first n requests of q and returns how many were taken; *err is the errno of the first that was not.
int pk_post(struct pk_queue *q, int n, int *err);

// pk_poll moves completions to nic->done and returns how many, or -1. For each entry of the immediates' queue that was
// used up it posts a new one; if that fails, nic->failed says so.
int pk_poll(struct pk_nic *nic);

// pk_refill posts n entries to the immediates' queue and returns an errno.
int pk_refill(struct pk_nic *nic, int n);

// pk_lend posts one message buffer and returns an errno.
int pk_lend(struct pk_nic *nic, uint64_t id, uint64_t addr, uint32_t len, uint32_t lkey);

// pk_arm asks for an event at the next completion and returns an errno.
int pk_arm(struct pk_nic *nic);

// pk_cq_events takes all events off the channel, without blocking, and returns how many.
int pk_cq_events(struct pk_nic *nic);

// pk_async takes one asynchronous event, without blocking: its type and the queue pair's number, or 0. -1: none.
int pk_async(struct pk_nic *nic, uint32_t *qpn);

int pk_port(struct ibv_context *ctx, uint8_t port, struct ibv_port_attr *attr);
struct ibv_mr *pk_reg(struct ibv_pd *pd, uint64_t addr, uint64_t len, int access);

// pk_bind opens len bytes at addr of mr by mw and waits up to wait_ms for the card to have done so. It returns an errno,
// ETIMEDOUT among them, or -(completion status).
int pk_bind(struct pk_nic *nic, struct ibv_mw *mw, struct ibv_mr *mr, uint64_t addr, uint64_t len, int wait_ms);

// pk_probe writes len bytes at src to dst, which rkey opens or does not, through the bind queue pair to itself, and waits up
// to wait_ms for the answer. It returns as pk_bind does.
int pk_probe(struct pk_nic *nic, uint64_t src, uint32_t lkey, uint64_t dst, uint32_t rkey, uint32_t len, int wait_ms);

#endif

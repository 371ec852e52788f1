// Functions for the calls of libibverbs that Go cannot make itself: calls of macros, and batches in one call.
#ifndef PENSTOCK_VERBS_NATIVE_H
#define PENSTOCK_VERBS_NATIVE_H

#include <infiniband/verbs.h>
#include <stdint.h>

enum {
	PK_POST_MAX = 64,  // requests in one pk_post
	PK_POLL_MAX = 128, // completions in one pk_poll
};

// In the wr_id of a receive entry, one of the top two bits is set and names the receive queue. In the wr_id of a send
// request both bits are 0.
#define PK_ID_IMM (1ULL << 63)
#define PK_ID_MSG (1ULL << 62)

// PK_OP_SEND_IMM is a message with an immediate, which libibverbs reports as a message with a flag.
enum { PK_OP_SEND_IMM = 1 << 30 };

enum { PK_WRITE = 1, PK_WRITE_IMM = 2, PK_SEND = 3 };

// pk_request is one request; Go fills it in.
struct pk_request {
	uint64_t id;
	uint64_t local, remote;
	uint32_t len, lkey, rkey, imm;
	uint32_t op, signaled;
};

// pk_queue is the send queue of one queue pair: the batch of requests, and the work requests into which they are copied.
struct pk_queue {
	struct ibv_qp *qp;
	struct pk_request req[PK_POST_MAX];
	struct ibv_send_wr wr[PK_POST_MAX];
	struct ibv_sge sge[PK_POST_MAX];
};

// pk_completion holds the fields of a completion that Go reads.
struct pk_completion {
	uint64_t id;
	uint32_t status, imm, len, qpn, vendor, opcode;
};

// pk_nic is an open port and the objects that all its endpoints share.
struct pk_nic {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_srq *imm, *msg;
	struct ibv_qp *bind;
	struct ibv_cq *bind_cq;
	int failed; // errno of a pk_refill in pk_poll that failed, 0 if none
	struct ibv_recv_wr refill[PK_POLL_MAX];
	struct pk_completion done[PK_POLL_MAX];
};

struct pk_queue *pk_queue_new(struct ibv_qp *qp);
struct pk_nic *pk_nic_new(void);

// pk_post posts the first n requests of q and returns the number that the card accepted. *err is the errno of the first
// request that it did not accept, or 0.
int pk_post(struct pk_queue *q, int n, int *err);

// pk_poll moves completions to nic->done and returns their number, or a negative value on an error. For each consumed
// entry of the receive queue for immediates it posts a new entry; if that fails, it sets nic->failed.
int pk_poll(struct pk_nic *nic);

// pk_refill posts n entries to the receive queue for immediates. It returns 0 or an errno.
int pk_refill(struct pk_nic *nic, int n);

// pk_lend posts one buffer to the receive queue for messages. It returns 0 or an errno.
int pk_lend(struct pk_nic *nic, uint64_t id, uint64_t addr, uint32_t len, uint32_t lkey);

// pk_arm requests an event at the next completion. It returns 0 or an errno.
int pk_arm(struct pk_nic *nic);

// pk_cq_events consumes all events of the channel, without blocking, and returns their number.
int pk_cq_events(struct pk_nic *nic);

// pk_async consumes one asynchronous event, without blocking, and returns the event's type; -1 if there is none. *qpn is
// the number of the event's queue pair, or 0 if the event concerns no queue pair.
int pk_async(struct pk_nic *nic, uint32_t *qpn);

int pk_port(struct ibv_context *ctx, uint8_t port, struct ibv_port_attr *attr);
struct ibv_mr *pk_reg(struct ibv_pd *pd, uint64_t addr, uint64_t len, int access);

// pk_bind binds mw to len bytes at addr of mr and waits at most wait_ms for the completion. It returns 0 on success, an
// errno (ETIMEDOUT if there is no completion in time), or -(completion status).
int pk_bind(struct pk_nic *nic, struct ibv_mw *mw, struct ibv_mr *mr, uint64_t addr, uint64_t len, int wait_ms);

// pk_probe writes len bytes from src to dst with the key rkey, which may be refused. It uses the bind queue pair, which is
// connected to itself, and waits at most wait_ms for the completion. It returns the same values as pk_bind.
int pk_probe(struct pk_nic *nic, uint64_t src, uint32_t lkey, uint64_t dst, uint32_t rkey, uint32_t len, int wait_ms);

#endif

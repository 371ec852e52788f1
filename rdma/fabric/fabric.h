// Functions for the calls of libfabric that Go needs. One call posts or polls a whole batch,
// because each call from Go to C has a cost. Errors are negative fi_errno values.

#ifndef PENSTOCK_FABRIC_H
#define PENSTOCK_FABRIC_H

#include <stdint.h>
#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_rma.h>

#define PF_NAME_MAX 256
#define PF_TEXT_MAX 256
#define PF_EVENTS 64
#define PF_HEAD 20

// The kinds of operations. The kind determines the meaning of a completion.
enum {
	PF_WORK = 1,      // write or send of an endpoint
	PF_HUB_RECV = 2,  // buffer of the hub
	PF_HUB_SEND = 3,  // frame that the hub sends
	PF_REMOTE = 4,    // a peer's write with CQ data; no local operation
};

// pf_op is the context of one operation. The provider may overwrite the first member.
struct pf_op {
	struct fi_context2 ctx;
	uint32_t kind;
	uint32_t owner;
	uint32_t slot;
};

// pf_work is one write or send that waits until the provider accepts it.
struct pf_work {
	struct pf_op *op;
	uint64_t buf, len;
	void *desc;
	uint64_t addr, key;  // of the remote memory
	uint64_t data;       // remote CQ data
	uint32_t with_data;
	uint32_t head;  // length of the slot's frame header in bytes; 0: a write; otherwise a send to the peer's hub
};

// pf_event is one completion.
struct pf_event {
	uint32_t kind, owner, slot;
	int32_t err, prov_err;
	uint32_t has_data;
	uint64_t data, len, src;
};

// pf_wish holds the properties of the domain to open.
struct pf_wish {
	const char *provider, *domain, *addr;
	uint32_t api; // the version whose behaviour is requested, as FI_VERSION
	uint32_t tx_depth, rx_depth, cq_depth;
};

// pf_traits are the provider's properties.
struct pf_traits {
	char provider[PF_TEXT_MAX], domain[PF_TEXT_MAX], fabric[PF_TEXT_MAX];
	uint64_t max_write, max_order, msg_order;
	uint32_t virt_addr, prov_key, mr_local, key_bytes, data_bytes;
	uint32_t tx_depth, rx_depth, addr_format, source;
	uint32_t api; // the version whose behaviour the provider has, as FI_VERSION
	int32_t fd;  // descriptor of the completion queue for waiting, or -1
};

struct pf_ep {
	struct fid_ep *ep;
	struct pf_op *ops;
	struct pf_work *ring;
	uint8_t *heads;  // PF_HEAD bytes for each slot
	struct fid_mr *heads_mr;
	void *heads_desc;
	uint32_t depth, head, count;
	fi_addr_t peer, hub;
	// Templates for the calls of the provider, with the fields that are the same for every work.
	struct iovec iov[2];
	struct fi_rma_iov rma_iov;
	void *desc[2];
	struct fi_msg_rma rma;
	struct fi_msg msg;
};

struct pf_domain {
	struct fi_info *info;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_ep *hub;
};

int pf_list(uint32_t api, const char *provider, char *out, size_t size);
int pf_open(const struct pf_wish *wish, struct pf_domain **out, struct pf_traits *traits, char *what);
int pf_close(struct pf_domain *d);
int pf_hub_open(struct pf_domain *d, uint8_t *name, size_t *name_len, const char **what);

int pf_ep_open(struct pf_domain *d, uint32_t owner, uint32_t depth, uint32_t tclass, uint64_t local_key,
	struct pf_ep **out, uint8_t *name, size_t *name_len, const char **what);
int pf_ep_cut(struct pf_ep *e);
int pf_ep_stop_listening(struct pf_ep *e);
void pf_ep_free(struct pf_ep *e);
int pf_flush(struct pf_ep *e, uint32_t added);

int pf_av_insert(struct pf_domain *d, const uint8_t *addr, uint64_t *out);
int pf_av_remove(struct pf_domain *d, uint64_t addr);

int pf_mr_reg(struct pf_domain *d, uint64_t buf, uint64_t len, int remote, uint64_t key,
	struct fid_mr **out, uint64_t *out_key, void **desc);
int pf_mr_close(struct fid_mr *mr);

int pf_hub_recv(struct pf_domain *d, struct pf_op *op, void *buf, uint64_t len, void *desc);
int pf_hub_send(struct pf_domain *d, struct pf_op *op, void *buf, uint64_t len, void *desc, uint64_t to);

int pf_poll(struct pf_domain *d, struct pf_event *out, int max);
int pf_try_wait(struct pf_domain *d);
void pf_clear(struct pf_domain *d);
const char *pf_strerror(int err);
uint32_t pf_version(void);

#endif

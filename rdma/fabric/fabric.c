//go:build fabric && cgo && linux

#define _GNU_SOURCE
#include "fabric.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

static int fail(char *what, const char *call, int err) {
	snprintf(what, PF_TEXT_MAX, "%s: %s", call, fi_strerror(-err));
	return err;
}

static struct fi_info *hints(const char *provider) {
	struct fi_info *h = fi_allocinfo();
	if (!h)
		return NULL;
	h->caps = FI_MSG | FI_RMA | FI_SOURCE;
	h->mode = FI_CONTEXT | FI_CONTEXT2;
	h->ep_attr->type = FI_EP_RDM;
	h->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	h->domain_attr->threading = FI_THREAD_SAFE;
	h->domain_attr->resource_mgmt = FI_RM_ENABLED;
	// The poller drives progress. A progress thread of the provider would contend with
	// it for the same locks.
	h->domain_attr->control_progress = FI_PROGRESS_MANUAL;
	h->domain_attr->data_progress = FI_PROGRESS_MANUAL;
	h->fabric_attr->prov_name = strdup(provider);
	return h;
}

static void addr_text(const struct fi_info *i, char *out, size_t size) {
	out[0] = 0;
	if (i->addr_format == FI_SOCKADDR_IN && i->src_addr)
		inet_ntop(AF_INET, &((struct sockaddr_in *)i->src_addr)->sin_addr, out, size);
	else if (i->addr_format == FI_SOCKADDR_IN6 && i->src_addr)
		inet_ntop(AF_INET6, &((struct sockaddr_in6 *)i->src_addr)->sin6_addr, out, size);
}

// pf_list writes a line "provider domain address" for each domain, as many lines as fit into size.
int pf_list(uint32_t api, const char *provider, char *out, size_t size) {
	struct fi_info *h = hints(provider), *all = NULL, *i;
	size_t used = 0;
	if (!h)
		return -FI_ENOMEM;
	out[0] = 0;
	int ret = fi_getinfo(api, NULL, NULL, 0, h, &all);
	fi_freeinfo(h);
	if (ret)
		return ret;
	for (i = all; i; i = i->next) {
		char addr[INET6_ADDRSTRLEN];
		addr_text(i, addr, sizeof addr);
		int n = snprintf(out + used, size - used, "%s %s %s\n", i->fabric_attr->prov_name, i->domain_attr->name, addr);
		if (n < 0 || (size_t)n >= size - used) {
			out[used] = 0;
			break;
		}
		used += (size_t)n;
	}
	fi_freeinfo(all);
	return 0;
}

static void set_traits(const struct fi_info *i, struct pf_traits *t) {
	snprintf(t->provider, sizeof t->provider, "%s", i->fabric_attr->prov_name);
	snprintf(t->domain, sizeof t->domain, "%s", i->domain_attr->name ? i->domain_attr->name : "");
	snprintf(t->fabric, sizeof t->fabric, "%s", i->fabric_attr->name ? i->fabric_attr->name : "");
	t->max_write = i->ep_attr->max_msg_size;
	t->max_order = i->ep_attr->max_order_waw_size;
	t->msg_order = i->tx_attr->msg_order & i->rx_attr->msg_order & (FI_ORDER_WAW | FI_ORDER_RMA_WAW);
	t->virt_addr = !!(i->domain_attr->mr_mode & FI_MR_VIRT_ADDR);
	t->prov_key = !!(i->domain_attr->mr_mode & FI_MR_PROV_KEY);
	t->mr_local = !!(i->domain_attr->mr_mode & FI_MR_LOCAL);
	t->key_bytes = (uint32_t)i->domain_attr->mr_key_size;
	t->data_bytes = (uint32_t)i->domain_attr->cq_data_size;
	t->tx_depth = (uint32_t)i->tx_attr->size;
	t->rx_depth = (uint32_t)i->rx_attr->size;
	t->addr_format = i->addr_format;
	t->source = !!(i->caps & FI_SOURCE);
	t->api = i->fabric_attr->api_version;
}

// open_cq opens a completion queue, with a descriptor for waiting if the provider supports that.
static int open_cq(struct pf_domain *d, uint32_t depth, int32_t *fd) {
	struct fi_cq_attr attr = {.size = depth, .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_FD};
	*fd = -1;
	int ret = fi_cq_open(d->domain, &attr, &d->cq, NULL);
	if (!ret) {
		int raw;
		ret = fi_control(&d->cq->fid, FI_GETWAIT, &raw);
		if (!ret)
			*fd = raw;
		return ret;
	}
	attr.wait_obj = FI_WAIT_NONE;
	return fi_cq_open(d->domain, &attr, &d->cq, NULL);
}

int pf_open(const struct pf_wish *wish, struct pf_domain **out, struct pf_traits *traits, char *what) {
	struct fi_info *h = hints(wish->provider), *all = NULL, *i;
	struct pf_domain *d = calloc(1, sizeof *d);
	int ret;
	*out = NULL;
	if (!h || !d) {
		if (h)
			fi_freeinfo(h);
		free(d);
		return fail(what, "alloc", -FI_ENOMEM);
	}
	h->tx_attr->size = wish->tx_depth;
	h->rx_attr->size = wish->rx_depth;
	if (wish->domain[0])
		h->domain_attr->name = strdup(wish->domain);
	const char *node = wish->addr[0] ? wish->addr : NULL;
	ret = fi_getinfo(wish->api, node, NULL, node ? FI_SOURCE : 0, h, &all);
	fi_freeinfo(h);
	if (ret) {
		free(d);
		return fail(what, "fi_getinfo", ret);
	}
	for (i = all; i && strcmp(i->fabric_attr->prov_name, wish->provider); i = i->next)
		;
	if (i)
		d->info = fi_dupinfo(i);
	fi_freeinfo(all);
	if (!d->info) {
		free(d);
		return fail(what, "fi_getinfo: no such provider by itself", -FI_ENODATA);
	}
	set_traits(d->info, traits);

	struct fi_av_attr av = {.type = FI_AV_TABLE};
	const char *call = "fi_fabric";
	if (!(ret = fi_fabric(d->info->fabric_attr, &d->fabric, NULL))) {
		call = "fi_domain";
		if (!(ret = fi_domain(d->fabric, d->info, &d->domain, NULL))) {
			call = "fi_av_open";
			if (!(ret = fi_av_open(d->domain, &av, &d->av, NULL))) {
				call = "fi_cq_open";
				ret = open_cq(d, wish->cq_depth, &traits->fd);
			}
		}
	}
	if (ret) {
		fail(what, call, ret);
		pf_close(d);
		return ret;
	}
	*out = d;
	return 0;
}

static int close_fid(struct fid *f, int ret) {
	int r = f ? fi_close(f) : 0;
	return ret ? ret : r;
}

int pf_close(struct pf_domain *d) {
	int ret = 0;
	if (d->hub)
		ret = close_fid(&d->hub->fid, ret);
	if (d->cq)
		ret = close_fid(&d->cq->fid, ret);
	if (d->av)
		ret = close_fid(&d->av->fid, ret);
	if (d->domain)
		ret = close_fid(&d->domain->fid, ret);
	if (d->fabric)
		ret = close_fid(&d->fabric->fid, ret);
	if (d->info)
		fi_freeinfo(d->info);
	free(d);
	return ret;
}

// make_ep opens and enables an endpoint.
static int make_ep(struct pf_domain *d, struct fid_ep **out, uint8_t *name, size_t *name_len, const char **what) {
	int ret;
	*what = "fi_endpoint";
	if ((ret = fi_endpoint(d->domain, d->info, out, NULL)))
		return ret;
	*what = "fi_ep_bind";
	if (!(ret = fi_ep_bind(*out, &d->av->fid, 0)) && !(ret = fi_ep_bind(*out, &d->cq->fid, FI_TRANSMIT | FI_RECV))) {
		*what = "fi_enable";
		if (!(ret = fi_enable(*out))) {
			*what = "fi_getname";
			ret = fi_getname(&(*out)->fid, name, name_len);
		}
	}
	if (ret) {
		fi_close(&(*out)->fid);
		*out = NULL;
	}
	return ret;
}

int pf_hub_open(struct pf_domain *d, uint8_t *name, size_t *name_len, const char **what) {
	return make_ep(d, &d->hub, name, name_len, what);
}

int pf_ep_open(struct pf_domain *d, uint32_t owner, uint32_t depth, uint32_t tclass, uint64_t local_key,
	       struct pf_ep **out, uint8_t *name, size_t *name_len, const char **what) {
	struct pf_ep *e = calloc(1, sizeof *e);
	int ret = -FI_ENOMEM;
	*what = "alloc";
	if (e) {
		e->ops = calloc(depth, sizeof *e->ops);
		e->ring = calloc(depth, sizeof *e->ring);
		e->heads = calloc(depth, PF_HEAD);
	}
	if (!e || !e->ops || !e->ring || !e->heads)
		goto fail;
	e->depth = depth;
	for (uint32_t i = 0; i < depth; i++)
		e->ops[i] = (struct pf_op){.kind = PF_WORK, .owner = owner, .slot = i};
	e->rma = (struct fi_msg_rma){.msg_iov = e->iov, .desc = e->desc, .iov_count = 1, .rma_iov = &e->rma_iov, .rma_iov_count = 1};
	e->msg = (struct fi_msg){.msg_iov = e->iov, .desc = e->desc};
	if (local_key) {
		uint64_t key;
		*what = "fi_mr_reg";
		if ((ret = pf_mr_reg(d, (uintptr_t)e->heads, depth * PF_HEAD, 0, local_key, &e->heads_mr, &key, &e->heads_desc)))
			goto fail;
	}
	d->info->tx_attr->tclass = tclass;
	if ((ret = make_ep(d, &e->ep, name, name_len, what)))
		goto fail;
	*out = e;
	return 0;
fail:
	if (e) {
		pf_ep_cut(e);
		pf_ep_free(e);
	}
	return ret;
}

// listens reports whether fd is the socket that listens at addr.
static int listens(int fd, const uint8_t *addr, size_t len) {
	uint8_t name[PF_NAME_MAX];
	socklen_t size = sizeof name;
	int yes = 0;
	socklen_t yes_size = sizeof yes;
	if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &yes, &yes_size) || !yes)
		return 0;
	return !getsockname(fd, (struct sockaddr *)name, &size) && size == len && !memcmp(name, addr, len);
}

// pf_ep_stop_listening closes the socket on which the endpoint listens. It puts an eventfd
// under the same descriptor number, which the provider closes later. After that the endpoint
// accepts no connections.
int pf_ep_stop_listening(struct pf_ep *e) {
	uint8_t addr[PF_NAME_MAX];
	size_t len = sizeof addr;
	int ret = fi_getname(&e->ep->fid, addr, &len);
	if (ret)
		return ret;
	DIR *d = opendir("/proc/self/fd");
	if (!d)
		return -errno;
	ret = -FI_ENODATA;
	for (struct dirent *f; ret == -FI_ENODATA && (f = readdir(d));) {
		int fd = atoi(f->d_name);
		if (!listens(fd, addr, len))
			continue;
		int stand_in = eventfd(0, EFD_CLOEXEC);
		ret = stand_in < 0 || dup3(stand_in, fd, O_CLOEXEC) < 0 ? -errno : 0;
		if (stand_in >= 0)
			close(stand_in);
	}
	closedir(d);
	return ret;
}

int pf_ep_cut(struct pf_ep *e) {
	int ret = e->ep ? fi_close(&e->ep->fid) : 0;
	e->ep = NULL;
	e->count = 0;
	return ret;
}

void pf_ep_free(struct pf_ep *e) {
	if (e->heads_mr)
		fi_close(&e->heads_mr->fid);
	free(e->ops);
	free(e->ring);
	free(e->heads);
	free(e);
}

// post_head sends the header of w and then w to the peer's hub. The peer's receipt reports
// the result, so the provider's completion need only mean that the message was sent.
static ssize_t post_head(struct pf_ep *e, struct pf_work *w, uint64_t more) {
	e->iov[0].iov_base = e->heads + (size_t)w->op->slot * PF_HEAD;
	e->iov[0].iov_len = w->head;
	e->desc[0] = e->heads_desc;
	e->iov[1].iov_base = (void *)(uintptr_t)w->buf;
	e->iov[1].iov_len = w->len;
	e->desc[1] = w->desc;
	e->msg.iov_count = w->len ? 2 : 1;
	e->msg.addr = e->hub;
	e->msg.context = w->op;
	return fi_sendmsg(e->ep, &e->msg, FI_COMPLETION | more);
}

// post_write gives a write to the provider. Its completion must mean that the bytes are in
// place, not that they were sent.
static ssize_t post_write(struct pf_ep *e, struct pf_work *w, uint64_t more) {
	e->iov[0].iov_base = (void *)(uintptr_t)w->buf;
	e->iov[0].iov_len = w->len;
	e->desc[0] = w->desc;
	e->rma_iov.addr = w->addr;
	e->rma_iov.len = w->len;
	e->rma_iov.key = w->key;
	e->rma.addr = e->peer;
	e->rma.context = w->op;
	e->rma.data = w->data;
	return fi_writemsg(e->ep, &e->rma, FI_COMPLETION | FI_DELIVERY_COMPLETE | more | (w->with_data ? FI_REMOTE_CQ_DATA : 0));
}

// pf_flush adds works to the ring and gives the ring's works to the provider, in order. It
// returns the number of works that are left because the provider is full. After an error the
// failed work is at the head of the ring.
int pf_flush(struct pf_ep *e, uint32_t added) {
	e->count += added;
	while (e->count) {
		struct pf_work *w = &e->ring[e->head];
		uint64_t more = e->count > 1 ? FI_MORE : 0;
		ssize_t ret = w->head ? post_head(e, w, more) : post_write(e, w, more);
		if (ret == -FI_EAGAIN)
			return (int)e->count;
		if (ret)
			return (int)ret;
		e->head = (e->head + 1) % e->depth;
		e->count--;
	}
	return 0;
}

int pf_av_insert(struct pf_domain *d, const uint8_t *addr, uint64_t *out) {
	fi_addr_t a = FI_ADDR_NOTAVAIL;
	int n = fi_av_insert(d->av, addr, 1, &a, 0, NULL);
	*out = a;
	if (n < 0)
		return n;
	return n == 1 && a != FI_ADDR_NOTAVAIL ? 0 : -FI_EADDRNOTAVAIL;
}

int pf_av_remove(struct pf_domain *d, uint64_t addr) {
	fi_addr_t a = addr;
	return fi_av_remove(d->av, &a, 1, 0);
}

int pf_mr_reg(struct pf_domain *d, uint64_t buf, uint64_t len, int remote, uint64_t key,
	      struct fid_mr **out, uint64_t *out_key, void **desc) {
	uint64_t access = FI_WRITE | FI_SEND | FI_RECV | (remote ? FI_REMOTE_WRITE : 0);
	int ret = fi_mr_reg(d->domain, (void *)(uintptr_t)buf, len, access, 0, key, 0, out, NULL);
	if (ret)
		return ret;
	*out_key = fi_mr_key(*out);
	*desc = fi_mr_desc(*out);
	return 0;
}

int pf_mr_close(struct fid_mr *mr) { return fi_close(&mr->fid); }

int pf_hub_recv(struct pf_domain *d, struct pf_op *op, void *buf, uint64_t len, void *desc) {
	return (int)fi_recv(d->hub, buf, len, desc, FI_ADDR_UNSPEC, op);
}

int pf_hub_send(struct pf_domain *d, struct pf_op *op, void *buf, uint64_t len, void *desc, uint64_t to) {
	return (int)fi_send(d->hub, buf, len, desc, to, op);
}

// set_origin sets the kind, owner and slot of the operation that completed. It checks the flag
// of a peer's write first, because for such a write some providers set the context to a pointer
// of their own.
static void set_origin(struct pf_event *ev, const void *context, uint64_t flags) {
	const struct pf_op *op = context;
	ev->has_data = !!(flags & FI_REMOTE_CQ_DATA);
	if ((flags & FI_REMOTE_WRITE) || !op) {
		ev->kind = PF_REMOTE;
		return;
	}
	ev->kind = op->kind;
	ev->owner = op->owner;
	ev->slot = op->slot;
}

static int read_error(struct pf_domain *d, struct pf_event *ev) {
	struct fi_cq_err_entry e = {0};
	ssize_t n = fi_cq_readerr(d->cq, &e, 0);
	if (n == -FI_EAGAIN)
		return 0;
	if (n < 0)
		return (int)n;
	memset(ev, 0, sizeof *ev);
	set_origin(ev, e.op_context, e.flags);
	ev->err = e.err ? e.err : FI_EOTHER;
	ev->prov_err = e.prov_errno;
	ev->src = FI_ADDR_NOTAVAIL;
	return 1;
}

// pf_poll drives the provider's progress and moves up to max completions to out.
int pf_poll(struct pf_domain *d, struct pf_event *out, int max) {
	struct fi_cq_data_entry entries[PF_EVENTS];
	fi_addr_t src[PF_EVENTS];
	if (max > PF_EVENTS)
		max = PF_EVENTS;
	ssize_t n = fi_cq_readfrom(d->cq, entries, (size_t)max, src);
	if (n == -FI_EAGAIN)
		return 0;
	if (n == -FI_EAVAIL)
		return read_error(d, out);
	for (ssize_t i = 0; i < n; i++) {
		memset(&out[i], 0, sizeof out[i]);
		set_origin(&out[i], entries[i].op_context, entries[i].flags);
		out[i].data = entries[i].data;
		out[i].len = entries[i].len;
		out[i].src = src[i];
	}
	return (int)n;
}

int pf_try_wait(struct pf_domain *d) {
	struct fid *f = &d->cq->fid;
	return fi_trywait(d->fabric, &f, 1);
}

// pf_clear waits for a completion for at most a millisecond. Only a wait resets the queue's
// descriptor, which stays readable after a completion. fi_trywait should reset the descriptor,
// but does nothing in net (1.17) and its successors.
void pf_clear(struct pf_domain *d) {
	struct fi_cq_data_entry none;
	(void)fi_cq_sread(d->cq, &none, 0, NULL, 1);
}

const char *pf_strerror(int err) { return fi_strerror(err); }

uint32_t pf_version(void) { return fi_version(); }

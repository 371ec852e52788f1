// fabric_rma PROVIDER SECONDS BLOCK WINDOW: the rate of one-sided writes of BLOCK
// bytes between two processes of this host over libfabric, as fi_rma_bw of fabtests
// takes it: reliable datagrams, WINDOW writes under way, nothing else. It prints the
// bytes and the seconds. The peer of package rdma/fabric where fabtests is not
// installed.
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MEMORY = 64 << 20, REAP = 16 };

static uint64_t block;
static long window;

// What the target tells the writer.
struct where {
	uint64_t key, base, addrlen;
	char addr[512];
};

static struct fi_info *info;
static struct fid_fabric *fabric;
static struct fid_domain *domain;
static struct fid_ep *ep;
static struct fid_cq *cq;
static struct fid_av *av;
static struct fid_mr *mr;
static char *memory;

static void must(const char *what, long ret) {
	if (ret) {
		fprintf(stderr, "%s: %s\n", what, fi_strerror((int)-ret));
		exit(1);
	}
}

// begin opens an endpoint of the provider and registers memory for access.
static void begin(const char *provider, uint64_t access) {
	struct fi_info *hints = fi_allocinfo();
	hints->caps = FI_MSG | FI_RMA;
	hints->ep_attr->type = FI_EP_RDM;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	hints->fabric_attr->prov_name = strdup(provider);
	must("fi_getinfo", fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &info));
	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	must("fi_domain", fi_domain(fabric, info, &domain, NULL));
	struct fi_cq_attr cqa = {.format = FI_CQ_FORMAT_CONTEXT, .size = 4 * window};
	must("fi_cq_open", fi_cq_open(domain, &cqa, &cq, NULL));
	struct fi_av_attr ava = {.type = FI_AV_TABLE};
	must("fi_av_open", fi_av_open(domain, &ava, &av, NULL));
	must("fi_endpoint", fi_endpoint(domain, info, &ep, NULL));
	must("fi_ep_bind cq", fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
	must("fi_ep_bind av", fi_ep_bind(ep, &av->fid, 0));
	must("fi_enable", fi_enable(ep));
	memory = mmap(NULL, MEMORY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		must("mmap", -FI_ENOMEM);
	madvise(memory, MEMORY, MADV_HUGEPAGE);
	memset(memory, 1, MEMORY);
	must("fi_mr_reg", fi_mr_reg(domain, memory, MEMORY, access, 0, 1, 0, &mr, NULL));
	if (info->domain_attr->mr_mode & FI_MR_ENDPOINT) {
		must("fi_mr_bind", fi_mr_bind(mr, &ep->fid, 0));
		must("fi_mr_enable", fi_mr_enable(mr));
	}
}

// reap takes completions; it also makes progress.
static long reap(void) {
	struct fi_cq_entry done[REAP];
	ssize_t n = fi_cq_read(cq, done, REAP);
	if (n == -FI_EAGAIN) {
		sched_yield(); // the other process may need this very CPU
		return 0;
	}
	if (n == -FI_EAVAIL) {
		struct fi_cq_err_entry e = {0};
		fi_cq_readerr(cq, &e, 0);
		must("write", -e.err);
	}
	if (n < 0)
		must("fi_cq_read", n);
	return n;
}

static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void target(const char *provider, int tell) {
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	begin(provider, FI_REMOTE_WRITE);
	struct where w = {.key = fi_mr_key(mr), .addrlen = sizeof w.addr};
	w.base = info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uintptr_t)memory : 0;
	size_t len = sizeof w.addr;
	must("fi_getname", fi_getname(&ep->fid, w.addr, &len));
	w.addrlen = len;
	if (write(tell, &w, sizeof w) != sizeof w)
		exit(1);
	for (;;)
		reap();
}

// post offers a write until the provider takes it.
static long post(const struct where *w, fi_addr_t to, uint64_t at) {
	long done = 0;
	ssize_t ret;
	while ((ret = fi_write(ep, memory + at, block, fi_mr_desc(mr), to, w->base + at, w->key, NULL)) == -FI_EAGAIN)
		done += reap();
	must("fi_write", ret);
	return done;
}

int main(int argc, char **argv) {
	if (argc == 5) {
		block = strtoull(argv[3], NULL, 10);
		window = atol(argv[4]);
	}
	if (block < 1 || block > MEMORY || window < 1 || window > 1024) {
		fprintf(stderr, "usage: fabric_rma PROVIDER SECONDS BLOCK WINDOW\n");
		return 2;
	}
	int pipes[2];
	if (pipe(pipes))
		return 1;
	pid_t child = fork();
	if (child < 0)
		return 1;
	if (child == 0) {
		close(pipes[0]);
		target(argv[1], pipes[1]);
	}
	close(pipes[1]);
	struct where w;
	if (read(pipes[0], &w, sizeof w) != sizeof w) {
		fprintf(stderr, "the target did not come up\n");
		return 1;
	}
	begin(argv[1], FI_WRITE);
	fi_addr_t to;
	if (fi_av_insert(av, w.addr, 1, &to, 0, NULL) != 1)
		must("fi_av_insert", -FI_EINVAL);
	// The first write makes the connection.
	long under_way = 1 - post(&w, to, 0);
	while (under_way > 0)
		under_way -= reap();
	double start = now(), end = start + atof(argv[2]), t;
	uint64_t bytes = 0, at = 0;
	while ((t = now()) < end) {
		while (under_way < window && t < end) {
			under_way += 1 - post(&w, to, at);
			at = at + 2 * block <= MEMORY ? at + block : 0;
			bytes += block;
		}
		under_way -= reap();
	}
	while (under_way > 0)
		under_way -= reap();
	printf("%llu %.6f\n", (unsigned long long)bytes, now() - start);
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	return 0;
}

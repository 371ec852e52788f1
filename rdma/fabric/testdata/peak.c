// A benchmark of the provider without this package: one process writes into the memory
// of another by one-sided writes, several of them in flight. A write completes when its
// bytes are in place. bench_test.go compiles and runs this program.
//
//	peak target PROVIDER ADDRESS BYTES              prints "name key base", then lands writes until stdin ends
//	peak source PROVIDER ADDRESS BYTES NAME KEY BASE
//	     reads "size count depth" lines and prints the seconds that each took

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MUST(call)                                                                                   \
	do {                                                                                         \
		long ret_ = (call);                                                                  \
		if (ret_) {                                                                          \
			fprintf(stderr, "peak: %s: %s\n", #call, fi_strerror((int)(ret_ < 0 ? -ret_ : ret_))); \
			exit(1);                                                                     \
		}                                                                                    \
	} while (0)

static struct fi_info *info;
static struct fid_fabric *fabric;
static struct fid_domain *domain;
static struct fid_av *av;
static struct fid_cq *cq;
static struct fid_ep *ep;
static struct fid_mr *mr;
static char *mem;
static int fd = -1;   // descriptor of the completion queue for waiting, or -1
static unsigned idle; // consecutive polls without a completion
static unsigned spins = 32; // polls before sleeping, as in rdma/group

static void open_all(char **argv, uint64_t access) {
	struct fi_info *h = fi_allocinfo();
	size_t bytes = strtoull(argv[4], NULL, 10);
	h->caps = FI_MSG | FI_RMA;
	h->mode = FI_CONTEXT | FI_CONTEXT2;
	h->ep_attr->type = FI_EP_RDM;
	h->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	h->domain_attr->control_progress = FI_PROGRESS_MANUAL;
	h->domain_attr->data_progress = FI_PROGRESS_MANUAL;
	h->fabric_attr->prov_name = strdup(argv[2]);
	MUST(fi_getinfo(FI_VERSION(1, 17), argv[3][0] ? argv[3] : NULL, NULL, argv[3][0] ? FI_SOURCE : 0, h, &info));
	MUST(fi_fabric(info->fabric_attr, &fabric, NULL));
	MUST(fi_domain(fabric, info, &domain, NULL));
	struct fi_av_attr aa = {.type = FI_AV_TABLE};
	MUST(fi_av_open(domain, &aa, &av, NULL));
	struct fi_cq_attr ca = {.size = 1024, .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_FD};
	if (!fi_cq_open(domain, &ca, &cq, NULL)) {
		MUST(fi_control(&cq->fid, FI_GETWAIT, &fd));
	} else {
		ca.wait_obj = FI_WAIT_NONE;
		MUST(fi_cq_open(domain, &ca, &cq, NULL));
	}
	MUST(fi_endpoint(domain, info, &ep, NULL));
	MUST(fi_ep_bind(ep, &av->fid, 0));
	MUST(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
	MUST(fi_enable(ep));
	mem = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (mem == MAP_FAILED) {
		perror("peak: mmap");
		exit(1);
	}
	memset(mem, 1, bytes);
	MUST(fi_mr_reg(domain, mem, bytes, access, 0, 4711, 0, &mr, NULL));
}

// doze waits for the queue's descriptor. After a completion the descriptor stays
// readable until fi_cq_sread resets it (native_unsafe.go, clear).
static void doze(void) {
	struct pollfd p = {.fd = fd, .events = POLLIN};
	struct fi_cq_data_entry none;
	if (poll(&p, 1, 0) > 0)
		(void)fi_cq_sread(cq, &none, 0, NULL, 1);
	else
		poll(&p, 1, 100);
}

// reap returns the number of writes that have completed. It polls a few times before it
// sleeps. More polls would measure the scheduler on a machine with few cores, because the
// other process needs a core too. PEAK_SPINS overrides the number of polls.
static int reap(void) {
	struct fi_cq_data_entry e[64];
	ssize_t n = fi_cq_read(cq, e, 64);
	if (n == -FI_EAGAIN) {
		if (++idle > spins)
			fd < 0 ? (void)usleep(20) : doze();
		return 0;
	}
	idle = 0;
	if (n < 0) {
		fprintf(stderr, "peak: a write failed: %s\n", fi_strerror((int)-n));
		exit(1);
	}
	return (int)n;
}

static void target(void) {
	uint8_t name[256];
	size_t n = sizeof name;
	MUST(fi_getname(&ep->fid, name, &n));
	for (size_t i = 0; i < n; i++)
		printf("%02x", name[i]);
	printf(" %llu %llu\n", (unsigned long long)fi_mr_key(mr),
	       (unsigned long long)(info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uintptr_t)mem : 0));
	fflush(stdout);
	struct pollfd in = {.fd = 0, .events = POLLIN};
	for (unsigned turn = 0;; turn++) {
		reap();
		if (turn % 64 == 0 && poll(&in, 1, 0) && getchar() == EOF)
			return;
	}
}

static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void source(char **argv) {
	size_t bytes = strtoull(argv[4], NULL, 10), size, count, depth;
	uint8_t name[256] = {0};
	for (size_t i = 0; argv[5][2 * i] && i < sizeof name; i++)
		sscanf(argv[5] + 2 * i, "%2hhx", &name[i]);
	uint64_t key = strtoull(argv[6], NULL, 10), base = strtoull(argv[7], NULL, 10);
	fi_addr_t to;
	if (fi_av_insert(av, name, 1, &to, 0, NULL) != 1)
		exit(1);
	void *desc = fi_mr_desc(mr);
	while (scanf("%zu %zu %zu", &size, &count, &depth) == 3) {
		size_t posted = 0, done = 0, places = bytes / size;
		double begin = now();
		while (done < count) {
			while (posted < count && posted - done < depth) {
				size_t off = posted % places * size;
				struct iovec iov = {mem + off, size};
				struct fi_rma_iov rma = {base + off, size, key};
				struct fi_msg_rma msg = {.msg_iov = &iov, .desc = &desc, .iov_count = 1, .addr = to, .rma_iov = &rma,
					.rma_iov_count = 1};
				ssize_t ret = fi_writemsg(ep, &msg, FI_COMPLETION | FI_DELIVERY_COMPLETE);
				if (ret == -FI_EAGAIN)
					break;
				MUST(ret);
				posted++;
			}
			done += (size_t)reap();
		}
		printf("%.9f\n", now() - begin);
		fflush(stdout);
	}
}

int main(int argc, char **argv) {
	if (getenv("PEAK_SPINS"))
		spins = (unsigned)atoi(getenv("PEAK_SPINS"));
	if (argc == 5 && !strcmp(argv[1], "target")) {
		open_all(argv, FI_REMOTE_WRITE);
		target();
	} else if (argc == 8 && !strcmp(argv[1], "source")) {
		open_all(argv, FI_WRITE);
		source(argv);
	} else {
		fprintf(stderr, "usage: peak target|source PROVIDER ADDRESS BYTES [NAME KEY BASE]\n");
		return 2;
	}
	return 0;
}

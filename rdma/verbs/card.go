package verbs

// card is one port of an open device. After start it includes the queues that the endpoints of
// that port share. native_unsafe.go implements it over libibverbs; card_linux_test.go has an
// implementation without hardware. poll, arm, lend and the queues' post run under domain.mu. They
// issue no command to the device, so they return at once. Every other method may take as long as a
// command to the device takes.
type card interface {
	// device, portState, pkeys and gids query the device at each call. pkeys returns the first
	// rows of the table of partition keys, gids the GIDs that are not zero.
	device() (deviceAttr, error)
	portState() (portAttr, error)
	pkeys(rows int) ([]pkey, error)
	gids() ([]gidEntry, error)

	// start creates the completion queue with cqe entries, and two receive queues: immEntries
	// entries for immediates and msgEntries for messages. Queue pairs use the partition key in row
	// partitionRow of the port's table.
	start(partitionRow uint16, cqe, immEntries, msgEntries int) error
	// startBind creates the bind queue pair, which window and write use. restartBind makes the
	// bind queue pair usable again after an error.
	startBind(loop path) error
	restartBind() error
	// channels returns two descriptors. completions becomes readable when there are completions,
	// async when there are asynchronous events. The caller closes both.
	channels() (completions, async int, err error)
	// resize makes the completion queue longer.
	resize(cqe int) error
	close() error

	// poll returns completions; the slice is valid until the next call of poll. poll may return
	// both completions and an error. After an error there are no further completions.
	poll() ([]completion, error)
	// arm requests an event at the next completion; takeEvents consumes these events.
	arm() error
	takeEvents() int
	// asyncEvent consumes one asynchronous event; ok is false if there is none. qpn is 0 if the
	// event concerns no queue pair.
	asyncEvent() (e asyncEvent, qpn uint32, ok bool)
	// lend posts a buffer to the receive queue of messages.
	lend(slot uint32, addr uint64, size, lkey uint32) error

	// register and registerDMABuf register memory with the rights r. The card assigns the keys.
	register(addr, size uint64, r rights) (registration, error)
	registerDMABuf(fd int, off, size, addr uint64, r rights) (registration, error)
	// window makes a window of a part of a registration, with its own key. The registration must
	// have rightBind. write writes to memory of this port. It returns a *wcError if the device
	// refuses the write. Calls of window and write must not overlap.
	window(of registration, addr, size uint64) (registration, error)
	write(from registration, src uint64, to registration, dst, size uint64) error

	// newQueue creates a queue pair with depth entries for requests. It consumes entries of the
	// receive queue for messages, or of that for immediates. The peer's access to memory is
	// limited to the rights r.
	newQueue(depth int, messages bool, r rights) (*queue, error)

	eventText(asyncEvent) string
	statusText(wcStatus) string
}

// registration is memory for which the card has keys.
type registration interface {
	keys() (local, remote uint32)
	// close invalidates the keys.
	close() error
}

// queue is a queue pair of an endpoint, with its buffer of requests.
type queue struct {
	pair
	// requests are the requests that the next post submits.
	requests []request
	qpn, psn uint32
}

// pair is the interface to the device for one queue pair.
type pair interface {
	// join connects the queue pair to the queue pair at the other end of p.
	join(p path) error
	// post posts the first n requests and returns how many the card accepted.
	post(n int) (int, error)
	// modify moves the queue pair to the state.
	modify(s qpState) error
	// destroy destroys the queue pair. close also releases its other resources. Both may be called
	// twice.
	destroy() error
	close() error
}

const (
	// postMax is the largest number of requests in one post.
	postMax = 64

	// The top two bits of a completion's id name the receive queue of the completion. In the id of
	// a request both bits are 0.
	idImm     = uint64(1) << 63
	idMessage = uint64(1) << 62

	// The kinds of received entries in completion.opcode (ibv_wc_opcode).
	gotMessage   = uint32(128)
	gotImmediate = uint32(129)

	// Values of request.op.
	opWrite    = 1
	opWriteImm = 2
	opSend     = 3
)

// request is one entry of requests.
type request struct {
	id, local, remote                  uint64
	len, lkey, rkey, imm, op, signaled uint32
}

// completion is one entry of the completion queue.
type completion struct {
	id                                    uint64
	status, imm, len, qpn, vendor, opcode uint32
}

// asyncEvent is the type of an asynchronous event (ibv_event_type).
type asyncEvent int

// Events to which the domain reacts.
const (
	eventCQ          asyncEvent = 0
	eventQPFatal     asyncEvent = 1
	eventQPRequest   asyncEvent = 2
	eventQPAccess    asyncEvent = 3
	eventDeviceFatal asyncEvent = 8
	eventPortDown    asyncEvent = 10
	eventLIDChange   asyncEvent = 11
	eventPKeyChange  asyncEvent = 12
	eventSRQ         asyncEvent = 14
	eventQPLast      asyncEvent = 16
	eventGIDChange   asyncEvent = 18
)

// rights are the permitted uses of memory, or the operations that a queue pair permits its peer
// (ibv_access_flags).
type rights uint32

// Rights that are requested.
const (
	rightLocalWrite  rights = 1 << 0
	rightRemoteWrite rights = 1 << 1
	rightBind        rights = 1 << 4 // to bind memory windows
	rightRelaxed     rights = 1 << 20
)

// rightsOf returns the rights of a region. libibverbs omits relaxed ordering if the device does
// not support it.
func rightsOf(remote, windows bool) rights {
	r := rightLocalWrite | rightRelaxed
	if remote {
		r |= rightRemoteWrite
	}
	if windows {
		r |= rightBind
	}
	return r
}

// queueRights returns the rights that a queue pair of that kind (writes or messages) gives its
// peer. Over the queue pair for messages the peer only sends, so it has no right to memory there.
func queueRights(kind int) rights {
	if kind == messages {
		return 0
	}
	return rightRemoteWrite
}

// deviceAttr has the fields of ibv_device_attr that the domain uses.
type deviceAttr struct {
	maxQPWork, maxCQE, maxSRQWork int
	ports                         uint8
	windows                       bool
	vendor                        uint32
}

// portAttr has the fields of ibv_port_attr that the domain uses.
type portAttr struct {
	active     bool
	mtu        uint8
	lid        uint16
	layer      linkLayer
	maxMessage uint32
	pkeys      int // length of the table of partition keys
}

// maxWrite is the longest payload of one Work, in bytes.
func (p portAttr) maxWrite() uint64 { return min(uint64(p.maxMessage), 1<<30) }

// qpState is a state to which a queue pair is moved (ibv_qp_state).
type qpState int

const (
	stateReset qpState = 0
	stateError qpState = 6
)

// path is the route of packets from a queue pair to the queue pair to which it is connected.
type path struct {
	port, mtu            uint8
	gidIndex             uint32
	remoteGID            gid
	remoteLID            uint16
	remoteQPN            uint32
	localPSN, remotePSN  uint32
	marking              marking
	timeoutCode, retries uint8
	rnrTimer, rnrTries   uint8
}

// marking holds the fields of a packet by which switches recognize a traffic class.
type marking struct{ serviceLevel, trafficClass uint8 }

const (
	// rnrTimer and rnrTries apply if the receiver has no receive entry: the sender's wait before
	// each retry, as an InfiniBand code, and the number of retries. For immediates, code 12 is 0.64
	// ms, and 7 means retries without limit, because every poll refills the receive queue for
	// immediates. For messages, code 24 is 41 ms, with six retries. The send fails if the peer has
	// posted no buffer in this time.
	rnrTimerImm, rnrTriesImm         = 12, 7
	rnrTimerMessage, rnrTriesMessage = 24, 6
)

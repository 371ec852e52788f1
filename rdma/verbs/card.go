package verbs

// card is one port of an open device and, after start, the queues that the endpoints of that
// port share. native_unsafe.go implements it over libibverbs; card_linux_test.go has one without
// hardware. poll, arm, lend and the queues' post run under domain.mu and take no command of
// the device, so they return at once. Each other method may take as long as the device does.
type card interface {
	// device, portState, pkeys and gids ask the device each time. pkeys returns the first
	// rows of the table of partition keys, gids the GIDs that are not zero.
	device() (deviceAttr, error)
	portState() (portAttr, error)
	pkeys(rows int) ([]pkey, error)
	gids() ([]gidEntry, error)

	// start makes the completion queue, of cqe entries, and the two receive queues. Queue
	// pairs use partitionRow of the table of partition keys.
	start(partitionRow uint16, cqe, immEntries, msgEntries int) error
	// startBind makes the queue pair on which window and write work; restartBind brings it
	// back from an error.
	startBind(loop path) error
	restartBind() error
	// channels returns descriptors that can be read when there are completions, and when
	// there are events. The caller closes them.
	channels() (completions, async int, err error)
	// resize makes the completion queue longer.
	resize(cqe int) error
	close() error

	// poll returns completions; the slice is valid until the next poll. With an error there
	// may be some too, and nothing comes after them.
	poll() ([]completion, error)
	// arm asks for an event at the next completion; takeEvents takes these events.
	arm() error
	takeEvents() int
	// asyncEvent takes one event; qpn is 0 where it is about no queue pair.
	asyncEvent() (e asyncEvent, qpn uint32, ok bool)
	// lend posts a buffer to the receive queue of messages.
	lend(slot uint32, addr uint64, size, lkey uint32) error

	// register and registerDMABuf give memory a key with these rights.
	register(addr, size uint64, r rights) (registration, error)
	registerDMABuf(fd int, off, size, addr uint64, r rights) (registration, error)
	// window gives a part of a registration that has rightBind a key of its own. write
	// writes to memory of this port, and returns a *wcError where the device refuses it.
	// One call at a time.
	window(of registration, addr, size uint64) (registration, error)
	write(from registration, src uint64, to registration, dst, size uint64) error

	// newQueue makes a queue pair for depth requests, which receives from the queue of
	// messages or from that of immediates; its peer has the rights r.
	newQueue(depth int, messages bool, r rights) (*queue, error)

	eventText(asyncEvent) string
	statusText(wcStatus) string
}

// registration is memory that the card has keys for.
type registration interface {
	keys() (local, remote uint32)
	// close takes the keys back.
	close() error
}

// queue is a queue pair of an endpoint.
type queue struct {
	pair
	// requests is where the requests of post are put.
	requests []request
	qpn, psn uint32
}

// pair has the operations of the device on a queue pair.
type pair interface {
	// join connects the queue pair to the one at the other end of p.
	join(p path) error
	// post posts the first n of the requests and returns how many were taken.
	post(n int) (int, error)
	// modify moves the queue pair to the state.
	modify(s qpState) error
	// destroy ends the queue pair, close releases the rest; both may be called twice.
	destroy() error
	close() error
}

const (
	// postMax is how many requests there can be in one post.
	postMax = 64

	// The top bits of a completion's id name the queue that it came from. The id of a
	// request has neither bit.
	idImm     = uint64(1) << 63
	idMessage = uint64(1) << 62

	// What a receive can be, in completion.opcode (ibv_wc_opcode).
	gotMessage   = uint32(128)
	gotImmediate = uint32(129)

	// request.op.
	opWrite    = 1
	opWriteImm = 2
	opSend     = 3
)

// request is one request of a post.
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

// Events that are acted on.
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

// rights are what may be done with memory, or by a queue pair's peer (ibv_access_flags).
type rights uint32

// Rights that are asked for.
const (
	rightLocalWrite  rights = 1 << 0
	rightRemoteWrite rights = 1 << 1
	rightBind        rights = 1 << 4 // of memory windows
	rightRelaxed     rights = 1 << 20
)

// rightsOf returns the rights of a region. libibverbs leaves relaxed ordering out where the
// device does not have it.
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

// queueRights returns what a peer may do over a queue pair of that kind (lane.kind): over
// that of messages it only sends, so that it has no right to memory there.
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

// qpState is a state that a queue pair is moved to (ibv_qp_state).
type qpState int

const (
	stateReset qpState = 0
	stateError qpState = 6
)

// path is how packets of a queue pair reach the one that it is joined to.
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

// marking is what switches see of a traffic class.
type marking struct{ serviceLevel, trafficClass uint8 }

const (
	// rnrTimerImm is how long a sender waits that found no receive entry: code 12
	// is 0.64 ms for immediates, and it tries without end (7), since every poll refills
	// that queue. 24 is 41 ms for messages, six times: a send fails if the peer has lent no
	// buffer for so long.
	rnrTimerImm, rnrTriesImm         = 12, 7
	rnrTimerMessage, rnrTriesMessage = 24, 6
)

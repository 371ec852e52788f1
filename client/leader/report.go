package leader

import (
	"slices"
	"strings"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client/traffic"
)

// registration returns the registration of the group, and the version of its members. The
// registration lists the requests that the group holds, and requests whose end the planner has not
// confirmed. registration drops all waiting reports except those about running attempts: the
// planner plans a request again if no group lists it, and a later request may have the same id.
func (l *Leader) registration() (*pb.RegisterGroup, int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := &pb.RegisterGroup{Group: l.opts.Group, Role: pb.Side(l.role), Planner: l.planner, Confirm: true, Seen: l.taken}
	r.Switches, r.Switching, r.Announced = l.opts.SwitchRole != nil, pb.Side(l.switching), pb.Side(l.announced)
	for _, m := range l.members {
		addr, err := marshalPeer(m.Peer)
		if err != nil {
			return nil, 0, err
		}
		spec := &pb.EngineSpec{
			Engine: m.Name, Node: l.opts.Node, Address: addr,
			HbmTokens: uint64(l.tokensOf(m.DeviceBlocks)), PromptTokens: uint64(l.tokensOf(m.PromptBlocks)),
			PrefixCacheTokens: uint64(l.tokensOf(m.PrefixCacheBlocks)),
		}
		if f := m.Footprint; f != (traffic.Footprint{}) {
			spec.Buffer = &pb.EngineBuffer{Bytes: uint64(f.Buffer), BlockBytes: uint64(f.Block), SumsBytes: uint64(f.Sums), RequestBytes: uint64(f.Request)}
		}
		r.Engines = append(r.Engines, spec)
	}
	for _, h := range l.held {
		if h.aborted {
			continue
		}
		r.Holding = append(r.Holding, l.listedLocked(h, false))
	}
	if l.planner == 0 {
		// A planner of an earlier version, which confirms no ends, would treat a listed request as
		// running.
		clear(l.ended)
	}
	for _, e := range l.ended {
		if _, ok := l.memberLocked(e.member.Name); ok {
			r.Holding = append(r.Holding, l.listedLocked(e.held, true))
		}
	}
	l.seen = 0
	l.reports = slices.DeleteFunc(l.reports, func(m report) bool { return m.of == nil || m.of.ended })
	signal(l.drained)
	return r, l.version, nil
}

// listedLocked returns a request as a registration lists it.
func (l *Leader) listedLocked(h *held, ended bool) *pb.HeldRequest {
	m := &pb.HeldRequest{Request: h.submit, Engine: h.member.Name, Ended: ended}
	if h.attempt != nil {
		m.Attempt, m.Order, m.PeerEngine = h.attempt.attempt, h.attempt.order, h.attempt.PeerEngine
		for p, landed := range h.attempt.arrived {
			// Only the latest read is listed, because the planner has ended the earlier reads.
			if order := h.attempt.ordered[p]; order > m.Reading.GetRead() {
				m.Reading = &pb.HeldRead{Part: l.partOf(h.attempt.Role, p), Read: order, Landed: uint32(landed)}
			}
		}
		for _, p := range h.attempt.brings {
			m.Parts = append(m.Parts, l.partOf(h.attempt.Role, p))
		}
	}
	return m
}

// partOf converts a part from blocks to tokens. role is the role of the engine that reads the part.
func (l *Leader) partOf(role Role, p traffic.Part) *pb.Part {
	return &pb.Part{Side: pb.Side(role), From: uint32(l.tokensOf(p.From)), To: uint32(l.tokensOf(p.To))}
}

// registered begins a session with the planner process of the given number. It queues the reports
// again that a broken session may have lost. These are the last report about the reads of each
// attempt, if the previous session was with the same planner process, and the end of each request
// that the planner has not confirmed.
func (l *Leader) registered(planner uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	same := planner == l.planner && planner != 0
	l.planner = planner
	var reports []report
	for _, h := range l.held {
		r := h.attempt
		switch {
		case r == nil || r.last == nil:
		case same && !h.aborted:
			reports = append(reports, report{r, r.last})
		default:
			r.last = nil
		}
	}
	for _, m := range l.reports {
		if !l.endsLocked(m) {
			reports = append(reports, m)
		}
	}
	for _, e := range l.ended {
		reports = append(reports, e.report)
	}
	l.reports = reports
}

// endsLocked reports whether m is the end of a request that the planner has not confirmed.
func (l *Leader) endsLocked(m report) bool {
	if m.of == nil {
		return false
	}
	e := l.ended[m.of.ID]
	return e != nil && e.report == m
}

// nicsEvery is the interval at which a fetch has the counters of the engines' compute NICs.
const nicsEvery = time.Second

// nics adds the counters of the engines' compute NICs to a fetch.
func (l *Leader) nics(f *pb.FetchWork) {
	l.mu.Lock()
	members := slices.Clone(l.members)
	l.mu.Unlock()
	for _, m := range members {
		i := slices.IndexFunc(f.Engines, func(e *pb.EngineState) bool { return e.Engine == m.Name })
		if i < 0 || m.NICs == nil {
			continue
		}
		nics := m.NICs()
		f.Engines[i].ComputeMicroseconds = uint64(time.Since(l.began).Microseconds())
		for _, n := range nics[:min(len(nics), MaxNICs)] {
			// A message with a name that is not UTF-8 would end the session.
			name := strings.ToValidUTF8(n.Name[:min(len(n.Name), maxName)], "")
			f.Engines[i].ComputeNics = append(f.Engines[i].ComputeNics, &pb.ComputeNIC{Nic: name, BytesOut: n.BytesOut, BytesIn: n.BytesIn})
		}
	}
}

// fetch returns a FetchWork message with the state of every engine and of the storage NIC.
func (l *Leader) fetch() *pb.FetchWork {
	l.mu.Lock()
	defer l.mu.Unlock()
	type load struct {
		tokens, requests, blocks int
		buffer                   int64
	}
	loads := make(map[string]load, len(l.members))
	for _, h := range l.held {
		of, tokens := loads[h.member.Name], int(h.submit.PromptTokens)
		if l.role == Decode {
			tokens += int(h.submit.OutputTokens)
		}
		of.tokens, of.requests, of.blocks = of.tokens+tokens, of.requests+1, of.blocks+l.blocksOf(tokens)
		if h.attempt != nil {
			of.buffer += h.attempt.buffer
		}
		loads[h.member.Name] = of
	}
	f := &pb.FetchWork{Seen: l.seen}
	for _, m := range l.members {
		of := loads[m.Name]
		f.Engines = append(f.Engines, &pb.EngineState{
			Engine: m.Name, Tokens: uint64(of.tokens), Requests: uint32(of.requests),
			HbmFreeTokens:   uint64(max(0, l.tokensOf(m.DeviceBlocks-of.blocks))),
			BufferFreeBytes: uint64(max(0, m.Footprint.Buffer-of.buffer)),
		})
	}
	rate := l.opts.ReadRate
	if rate == 0 {
		rate = l.meter.rate(time.Now())
	}
	f.Nodes = []*pb.NodeState{{Node: l.opts.Node, ReadQueueTokens: uint64(max(l.queue, 0)), ReadTokensPerSecond: rate}}
	return f
}

// mergeProgress queues one progress report for each request with new progress.
func (l *Leader) mergeProgress() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, h := range l.held {
		if r := h.attempt; r != nil && r.progress != nil {
			l.sayLocked(report{r, progressOf(r)})
		}
	}
}

// memberless reports whether the group has no engines.
func (l *Leader) memberless() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.members) == 0
}

// meter measures the rate of the storage NIC while it reads.
type meter struct {
	since time.Time // start of the present busy time; zero: the NIC is idle
	busy  time.Duration
	read  float64
}

// rate returns the measured rate in tokens per second; 0 until the NIC has been busy long enough.
func (m *meter) rate(now time.Time) float64 {
	busy := m.busy
	if !m.since.IsZero() {
		busy += now.Sub(m.since)
	}
	const window = 200 * time.Millisecond
	if busy < window {
		return 0
	}
	return m.read / busy.Seconds()
}

// queueLocked changes the reading queue by n tokens.
func (l *Leader) queueLocked(n int) {
	now := time.Now()
	if n > 0 && l.queue == 0 {
		l.meter.since = now
	}
	l.queue += n
	if n < 0 && l.queue == 0 && !l.meter.since.IsZero() {
		l.meter.busy += now.Sub(l.meter.since)
		l.meter.since = time.Time{}
	}
}

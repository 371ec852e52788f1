package console_test

import (
	"bufio"
	"context"
	"errors"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/server/console"
)

// event is a server-sent event.
type event struct{ name, data string }

// stream reads events.
type stream struct {
	t      *testing.T
	resp   *http.Response
	lines  *bufio.Reader
	cancel context.CancelFunc
}

// patience is the time within which an event or the end of a stream must arrive.
const patience = time.Minute

func listen(t *testing.T, url string) *stream {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("%s: %s, %s", url, resp.Status, resp.Header.Get("Content-Type"))
	}
	return &stream{t: t, resp: resp, lines: bufio.NewReader(resp.Body), cancel: cancel}
}

func (s *stream) close() {
	s.cancel()
	_ = s.resp.Body.Close() // the request was cancelled
}

// next returns the next event, or the error that ended the stream.
func (s *stream) next() (e event, err error) {
	for {
		line, err := s.lines.ReadString('\n')
		if err != nil {
			return e, err
		}
		line = strings.TrimSuffix(line, "\n")
		switch {
		case line == "" && e.name != "":
			return e, nil
		case strings.HasPrefix(line, "event: "):
			e.name = line[len("event: "):]
		case strings.HasPrefix(line, "data: "):
			e.data += line[len("data: "):] + "\n"
		}
	}
}

func (s *stream) event() event {
	s.t.Helper()
	e, err := s.next()
	if err != nil {
		s.t.Fatal(err)
	}
	return e
}

// ends reads until the stream ends.
func (s *stream) ends() {
	s.t.Helper()
	for {
		_, err := s.next()
		if errors.Is(err, context.DeadlineExceeded) {
			s.t.Fatal("the stream does not end")
		}
		if err != nil {
			return
		}
	}
}

const fast = 2 * time.Millisecond

// TestLive: a stream sends the state at its begin, and then each change.
func TestLive(t *testing.T) {
	src := &source{overview: sample()}
	_, url := serve(t, console.Options{Source: src, Interval: fast})
	s := listen(t, url+"/live/overview")
	defer s.close()
	if e := s.event(); e.name != "live" || !strings.Contains(e.data, "/v1") {
		t.Errorf("the first event is %+v", e)
	}
	if e := s.event(); e.name != "summary" || e.data != "Node n1 is serving. 5 faults. 2 members. Down: 1 node.\n" {
		t.Errorf("the second event is %+v", e)
	}
	src.set(func(s *source) { s.overview.Blocks = 987654 })
	if e := s.event(); e.name != "live" || !strings.Contains(e.data, "987,654") {
		t.Errorf("the event of a change is %+v", e)
	}
	src.set(func(s *source) {
		s.overview = sample()
		s.overview.NICs[1].Up = true
	})
	if e := s.event(); e.name != "live" || strings.Contains(e.data, "no carrier</td><td>unknown") {
		t.Errorf("the event of a repair is %+v", e)
	}
	if e := s.event(); e.name != "summary" || !strings.Contains(e.data, "4 faults") {
		t.Errorf("the summary after the repair is %+v", e)
	}
}

// TestLineEnds: no end of a line in a text of a client ends a line of an event, because a browser
// counts a lone carriage return as an end too.
func TestLineEnds(t *testing.T) {
	const forged = "x\r\revent: summary\rdata: Node n1 is serving. No faults.\r\r"
	for _, end := range []string{"\r", "\n", "\r\n"} {
		src := &source{actions: []console.Action{{Call: "SetQuota", Result: "NotFound", Request: strings.ReplaceAll(forged, "\r", end)}}}
		_, url := serve(t, console.Options{Source: src})
		s := listen(t, url+"/live/actions")
		var events strings.Builder
		for range 2 {
			for {
				line, err := s.lines.ReadString('\n')
				if err != nil {
					t.Fatal(err)
				}
				events.WriteString(line)
				if line == "\n" {
					break
				}
			}
		}
		s.close()
		for _, line := range strings.FieldsFunc(events.String(), func(r rune) bool { return r == '\r' || r == '\n' }) {
			if line != "event: live" && line != "event: summary" && !strings.HasPrefix(line, "data: ") {
				t.Errorf("with the end %q the stream has the line %q", end, line)
			}
		}
		if n := strings.Count(strings.ReplaceAll(events.String(), "\r", "\n"), "\nevent: "); n != 1 {
			t.Errorf("with the end %q the stream has %d events; want 2:\n%q", end, n+1, events.String())
		}
	}
}

// TestStreams: the number of streams is bounded, and an ended stream makes room for another.
func TestStreams(t *testing.T) {
	_, url := serve(t, console.Options{Source: &source{overview: sample()}, Interval: fast, Streams: 2})
	a, b := listen(t, url+"/live/overview"), listen(t, url+"/live/namespaces")
	defer b.close()
	if resp, body := get(t, url+"/live/overview"); resp.StatusCode != http.StatusServiceUnavailable || !strings.Contains(body, "2 streams") {
		t.Errorf("the third stream: %s, %s", resp.Status, body)
	}
	if resp, _ := get(t, url+"/"); resp.StatusCode != http.StatusOK {
		t.Errorf("a page beside the streams: %s", resp.Status)
	}
	a.close()
	awaitRoom(t, url+"/live/overview")
}

// awaitRoom waits until a stream is admitted, and closes it.
func awaitRoom(t *testing.T, url string) {
	t.Helper()
	for limit := time.Now().Add(patience); !admits(t, url); {
		if time.Now().After(limit) {
			t.Fatal("the ended stream does not make room")
		}
	}
}

// admits opens a stream, closes it, and reports whether it was admitted.
func admits(t *testing.T, url string) bool {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close() // a stream goes on until it is closed
	return resp.StatusCode == http.StatusOK
}

// TestStreamsPerCaller: one caller gets only a part of the streams, so that others can open pages.
func TestStreamsPerCaller(t *testing.T) {
	_, url := serve(t, console.Options{Source: &source{overview: sample()}, Interval: fast, StreamsPerCaller: 2})
	url += "/live/overview?caller="
	first := listen(t, url+"a")
	defer listen(t, url+"a").close()
	if resp, body := get(t, url+"a"); resp.StatusCode != http.StatusServiceUnavailable || !strings.Contains(body, "a has 2 streams") {
		t.Errorf("the third stream of a: %s, %s", resp.Status, body)
	}
	defer listen(t, url+"b").close()
	first.close()
	awaitRoom(t, url+"a")
	for range 3 { // more than one caller with a name may have
		defer listen(t, url).close()
	}
}

// TestMostStreams: without another limit there are at most 32 streams.
func TestMostStreams(t *testing.T) {
	_, url := serve(t, console.Options{Source: &source{overview: sample()}})
	for range 32 {
		defer listen(t, url+"/live/overview").close()
	}
	if admits(t, url+"/live/overview") {
		t.Error("the stream 33 was admitted")
	}
}

// TestSlowReader: a client that does not read is disconnected, and another one gets all events
// meanwhile.
func TestSlowReader(t *testing.T) {
	src := &source{namespaces: many()[:200]}
	_, url := serve(t, console.Options{Source: src, Interval: fast, WriteTimeout: time.Second, Streams: 2})
	slow, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Close()
	if err := slow.(*net.TCPConn).SetReadBuffer(4096); err != nil {
		t.Fatal(err)
	}
	if _, err := slow.Write([]byte("GET /live/namespaces HTTP/1.1\r\nHost: test\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	if _, err := slow.Read(make([]byte, 1)); err != nil { // the stream has begun
		t.Fatal(err)
	}
	reader := listen(t, url+"/live/overview")
	defer reader.close()
	for i, limit := 0, time.Now().Add(patience); ; i++ {
		src.set(func(s *source) {
			s.overview.Blocks = int64(i)
			s.namespaces = slices.Clone(s.namespaces)
			s.namespaces[0].UsedBytes = int64(i)
		})
		for e := reader.event(); e.name != "live"; {
			e = reader.event()
		}
		resp, err := http.Get(url + "/live/overview")
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close() // the stream goes on until it is closed
		if resp.StatusCode == http.StatusOK {
			return // the place of the slow client is free
		}
		if time.Now().After(limit) {
			t.Fatal("the slow client keeps its place")
		}
	}
}

// TestStop: Stop ends the streams and refuses further ones, and Close returns when they have ended.
func TestStop(t *testing.T) {
	c, url := serve(t, console.Options{Source: &source{overview: sample()}, Interval: time.Hour})
	s := listen(t, url+"/live/overview")
	defer s.close()
	s.event()
	c.Stop()
	s.ends()
	c.Close()
	if resp, _ := get(t, url+"/live/overview"); resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("a stream after Close: %s", resp.Status)
	}
}

// TestLostRole: a stream ends when its caller may not make the request any longer. Its connection, which
// has the deadline of the last event, serves no further request.
func TestLostRole(t *testing.T) {
	access := &caller{}
	_, url := serve(t, console.Options{Source: &source{overview: sample()}, Interval: fast, Access: access})
	s := listen(t, url+"/live/overview")
	defer s.close()
	s.event()
	if !s.resp.Close {
		t.Error("the connection of the stream is kept for other requests")
	}
	access.refused.Store(true)
	s.ends()
}

// TestSharedLoads: the state is loaded once for all streams of an interval, and not at all while
// there is no request.
func TestSharedLoads(t *testing.T) {
	src := &source{overview: sample()}
	now := start
	c, url := serve(t, console.Options{Source: src, Interval: fast, Now: func() time.Time { return now }})
	var streams []*stream
	for range 8 {
		s := listen(t, url+"/live/overview")
		s.event()
		streams = append(streams, s)
	}
	if n := src.loads.Load(); n != 1 {
		t.Errorf("8 streams loaded the state %d times at one moment", n)
	}
	for _, s := range streams {
		s.close()
	}
	c.Close()
	if n := src.loads.Load(); n != 1 {
		t.Errorf("the state was loaded %d times", n)
	}
	// A caller that took the time before another caller and loads after it gets the state of the other.
	src = &source{overview: sample()}
	times := make(chan time.Time, 2)
	_, url = serve(t, console.Options{Source: src, Interval: time.Second, Now: func() time.Time { return <-times }})
	for _, at := range []time.Duration{time.Millisecond, 0} {
		times <- start.Add(at)
		get(t, url+"/")
	}
	if n := src.loads.Load(); n != 1 {
		t.Errorf("2 callers at one moment loaded the state %d times", n)
	}
	// After a step of the clock back the state is loaded again.
	times <- start.Add(-time.Hour)
	get(t, url+"/")
	if n := src.loads.Load(); n != 2 {
		t.Errorf("%d loads after a step of the clock; want 2", n)
	}
}

package sys

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
)

// Memory is the memory of this process in bytes, from /proc/self/status.
type Memory struct {
	// RSSBytes is VmRSS: anonymous, file and shared pages, without reserved huge pages.
	// HugeTLBBytes is the size of the reserved huge pages that the process uses.
	RSSBytes     int64
	HugeTLBBytes int64
	// PeakRSSBytes is VmHWM: the maximum of RSSBytes.
	PeakRSSBytes int64
}

// ReadMemory returns the memory of this process now.
func ReadMemory() (Memory, error) {
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return Memory{}, fmt.Errorf("sys: memory of this process: %w", err)
	}
	return parseStatus(text)
}

// parseStatus extracts the figures of Memory from the text of /proc/PID/status.
func parseStatus(text []byte) (Memory, error) {
	var m Memory
	found := false
	for line := range bytes.Lines(text) {
		name, value, _ := strings.Cut(string(line), ":")
		to := map[string]*int64{"VmRSS": &m.RSSBytes, "VmHWM": &m.PeakRSSBytes, "HugetlbPages": &m.HugeTLBBytes}[name]
		if to == nil {
			continue
		}
		n, err := parseKB(value)
		if err != nil {
			return Memory{}, err
		}
		*to = n
		found = found || name == "VmRSS"
	}
	if !found {
		return Memory{}, fmt.Errorf("sys: no VmRSS line in /proc/self/status")
	}
	return m, nil
}

// parseKB reads "  1234 kB" as bytes.
func parseKB(s string) (int64, error) {
	digits, ok := strings.CutSuffix(strings.TrimSpace(s), " kB")
	n, err := strconv.ParseInt(strings.TrimSpace(digits), 10, 64)
	if !ok || err != nil || n < 0 || n > 1<<52 {
		return 0, fmt.Errorf("sys: %q is not a size in kB", s)
	}
	return n << 10, nil
}

// HugePages is the state of the reserved pool of 2 MiB pages, in pages.
type HugePages struct {
	Total, Free int64
}

// ReadHugePages returns the state of the reserved pool. Both numbers are 0 if the kernel has no such
// pool.
func ReadHugePages() (HugePages, error) {
	const dir = "/sys/kernel/mm/hugepages/hugepages-2048kB/"
	if _, err := os.Stat(dir); os.IsNotExist(err) {
		return HugePages{}, nil
	}
	var h HugePages
	for _, f := range []struct {
		name string
		to   *int64
	}{{"nr_hugepages", &h.Total}, {"free_hugepages", &h.Free}} {
		text, err := os.ReadFile(dir + f.name)
		if err != nil {
			return HugePages{}, fmt.Errorf("sys: huge page pool: %w", err)
		}
		if *f.to, err = strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err != nil {
			return HugePages{}, fmt.Errorf("sys: huge page pool, %s%s: %w", dir, f.name, err)
		}
	}
	return h, nil
}

// HugeBytes returns how many bytes of the mapping b are on huge pages at present, transparent or
// reserved.
func HugeBytes(b []byte) (int64, error) {
	start := address(b)
	if n, err := scanHuge(start, start+uint64(len(b))); err == nil {
		return n, nil
	}
	// The kernel is older than 6.7, or a container hides pagemap.
	return hugeInSmaps(start, start+uint64(len(b)))
}

// hugeInSmaps returns the same number as scanHuge, from /proc/self/smaps. It works on every kernel,
// but is slower, because the kernel walks the page tables of the whole process.
func hugeInSmaps(start, end uint64) (int64, error) {
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return 0, fmt.Errorf("sys: huge pages of a mapping: %w", err)
	}
	defer f.Close()
	return sumHuge(f, start, end)
}

// hugeFields are the lines of smaps that count huge pages: transparent ones of
// anonymous, shared and file mappings, and reserved ones.
const hugeFields = "AnonHugePages ShmemPmdMapped FilePmdMapped Private_Hugetlb Shared_Hugetlb"

// sumHuge adds up the huge pages of all mappings of an smaps text that overlap [start, end). A mapping
// counts for at most its bytes within [start, end).
func sumHuge(smaps io.Reader, start, end uint64) (int64, error) {
	var sum, inMapping, limit int64
	lines := bufio.NewScanner(smaps)
	for lines.Scan() {
		line := lines.Text()
		if lo, hi, ok := parseRange(line); ok {
			sum += min(inMapping, limit)
			inMapping, limit = 0, max(0, int64(min(hi, end))-int64(max(lo, start)))
			continue
		}
		name, value, ok := strings.Cut(line, ":")
		if !ok || limit == 0 || !strings.Contains(hugeFields, name) {
			continue
		}
		n, err := parseKB(value)
		if err != nil {
			return 0, err
		}
		inMapping += n
	}
	return sum + min(inMapping, limit), lines.Err()
}

// parseRange reads the first line of a mapping: "lo-hi perms offset …".
func parseRange(line string) (lo, hi uint64, ok bool) {
	span, _, ok := strings.Cut(line, " ")
	if !ok {
		return 0, 0, false
	}
	from, to, ok := strings.Cut(span, "-")
	if !ok {
		return 0, 0, false
	}
	lo, errLo := strconv.ParseUint(from, 16, 63)
	hi, errHi := strconv.ParseUint(to, 16, 63)
	return lo, hi, errLo == nil && errHi == nil
}

// Where the API listens, and when it refuses to: sockets of live and dead daemons, ports in use,
// addresses other machines could reach. Health and reflection on the way.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <fstream>

#include "api_fixture.h"
#include "grpc_peers.h"

namespace lode {
namespace {

void ExpectRefused(const Status& status, StatusCode code, const std::string& says) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_NE(Message(status).find(says), std::string::npos) << status;
  EXPECT_EQ(Message(status).find('\n'), std::string::npos) << status;
}

// Binds and listens, or only binds (a dead daemon's file after close).
int BoundSocket(const std::string& path, bool listening) {
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size());
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  if (listening) {
    EXPECT_EQ(listen(fd, 1), 0);
  }
  return fd;
}

TEST_F(ApiTest, SocketIsForOwnerAndGroup) {
  ASSERT_TRUE(Start().ok());
  struct stat info;
  ASSERT_EQ(stat(options_.socket.c_str(), &info), 0);
  EXPECT_TRUE(S_ISSOCK(info.st_mode));
  EXPECT_EQ(info.st_mode & 07777, 0660u);
}

TEST_F(ApiTest, DefaultSocketLiesInTheRuntimeFolder) {
  options_.socket.clear();
  options_.runtime_dir = dir_;
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(server_->endpoints().find("unix:" + dir_ + "/lode.sock 127.0.0.1:"), 0u)
      << server_->endpoints();
}

TEST_F(ApiTest, StaleSocketIsReplaced) {
  close(BoundSocket(options_.socket, true));
  ASSERT_TRUE(Start().ok());
  ExpectServes();
}

TEST_F(ApiTest, LiveSocketIsRefusedAndStays) {
  const int other = BoundSocket(options_.socket, true);
  ExpectRefused(Start(), StatusCode::kFailedPrecondition, "another daemon answers");
  EXPECT_TRUE(std::filesystem::exists(options_.socket));
  close(other);
}

TEST_F(ApiTest, SecondServerOnTheSameAddressesIsRefused) {
  options_.metrics_listen = "127.0.0.1:0";
  ASSERT_TRUE(Start().ok());
  const std::string tcp = TcpAddress();
  const std::string metrics = MetricsUrl().substr(7, MetricsUrl().rfind('/') - 7);
  ExpectRefused(StartApi(Context()).status(), StatusCode::kFailedPrecondition,
                "another daemon answers");
  options_.socket = dir_ + "/second.sock";
  options_.listen = tcp;
  ExpectRefused(StartApi(Context()).status(), StatusCode::kUnavailable, tcp);
  options_.listen = "127.0.0.1:0";
  options_.metrics_listen = metrics;
  ExpectRefused(StartApi(Context()).status(), StatusCode::kUnavailable, "metrics_listen");
  EXPECT_FALSE(std::filesystem::exists(options_.socket));  // a failed start leaves nothing
  options_.socket = dir_ + "/lode.sock";
  ExpectServes();
}

TEST_F(ApiTest, WrongSocketPathsAreRefused) {
  options_.socket = "/tmp/" + std::string(200, 'x');
  ExpectRefused(Start(), StatusCode::kInvalidArgument, "unix sockets allow 107");
  options_.socket = dir_ + "/a%41.sock";
  ExpectRefused(Start(), StatusCode::kInvalidArgument, "holds '%'");
  options_.socket = dir_ + "/missing/lode.sock";
  EXPECT_FALSE(Start().ok());
  options_.socket = dir_ + "/file";
  std::ofstream(options_.socket) << "precious";
  ExpectRefused(Start(), StatusCode::kFailedPrecondition, "is no socket");
  EXPECT_EQ(std::filesystem::file_size(options_.socket), 8u);
}

TEST_F(ApiTest, OnlyLoopbackIsServed) {
  for (const char* address : {"0.0.0.0:0", "[::]:0", ":0", "192.168.1.1:0", "example.org:0",
                              "127.example.org:0", "128.0.0.1:0", "127.0.0.1", "127.0.0.1:",
                              "127.0.0.1:x", "127.0.0.1:70000", "127.0.0.1:-1", "127.1:0"}) {
    options_.listen = address;
    ExpectRefused(Start(), StatusCode::kInvalidArgument, "option listen");
    options_.listen = "127.0.0.1:0";
    options_.metrics_listen = address;
    ExpectRefused(Start(), StatusCode::kInvalidArgument, "option metrics_listen");
    options_.metrics_listen = "127.0.0.1:0";
    EXPECT_FALSE(std::filesystem::exists(options_.socket)) << address;
  }
  options_.listen = "localhost:0";
  options_.metrics_listen.clear();
  EXPECT_TRUE(Start().ok());
}

TEST_F(ApiTest, TcpAndMetricsCanBeOff) {
  options_.listen.clear();
  options_.metrics_listen.clear();
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(server_->endpoints(), "unix:" + options_.socket);
  ExpectServes();
}

TEST_F(ApiTest, HealthFollowsServing) {
  ASSERT_TRUE(Start().ok());
  const auto channel = Channel("unix:" + options_.socket);
  for (const char* service : {"", "lode.v1.LodeService"}) {
    server_->SetServing(false);
    EXPECT_EQ(HealthOf(channel, service), "NOT_SERVING") << service;
    server_->SetServing(true);
    EXPECT_EQ(HealthOf(channel, service), "SERVING") << service;
  }
  EXPECT_EQ(HealthOf(channel, "no.such.Service"), "NOT_FOUND");
}

TEST_F(ApiTest, HealthWatcherDoesNotDelayShutdown) {
  ASSERT_TRUE(Start().ok());
  HealthWatcher watcher(Channel("unix:" + options_.socket));
  ASSERT_TRUE(watcher.ReadOne());
  const uint64_t before = NowNs();
  server_->Shutdown(NowNs() + 300'000'000'000ull);
  EXPECT_LT(NowNs() - before, 60'000'000'000ull);
}

TEST_F(ApiTest, ReflectionListsTheService) {
  ASSERT_TRUE(Start().ok());
  const std::string services = ReflectedServices(Channel("unix:" + options_.socket));
  EXPECT_NE(services.find("lode.v1.LodeService"), std::string::npos);
  EXPECT_NE(services.find("grpc.health.v1.Health"), std::string::npos);
}

}  // namespace
}  // namespace lode
